// Reads one JSON object of which every field must be understood: config.json and its like.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// `text` in double quotes, fit for a message or a log: control characters and bytes that are not
// UTF-8 are escaped, and what is longer than `max_bytes` ends in "...". Used for everything in a
// message that comes from a file.
std::string QuoteForMessage(std::string_view text, size_t max_bytes = 200);

// What nlohmann's parser says of a syntax error, made fit for a message in the same way and without
// its "[json.exception...]" tag.
std::string CleanJsonError(std::string_view what);

// One JSON object, each field of which has to be read, or be known and ignored, or else Finish
// refuses it by name: a field that nobody has heard of may change the mathematics, and then the
// answers would be wrong in silence.
//
// A field whose value is null counts as absent, for the getters and for Finish; IsNull tells the
// two apart. Every getter marks its field as read. Getters without a default throw if the field is
// absent. Errors of all getters: kCorruptData naming file, field, expected type and range, and the
// value found. Readers of one document share it and keep it alive; not thread-safe.
class ConfigReader {
 public:
  // Values nested deeper than this, and documents of more values or bytes, are refused.
  static constexpr size_t kMaxDepth = 64;
  static constexpr size_t kMaxValues = size_t{1} << 21;
  static constexpr size_t kMaxBytes = size_t{1} << 26;

  // `file_name` is used in messages only.
  // Errors: kCorruptData with line and column if `text` is no JSON (NaN and Infinity, which Python
  //   writes, are none), or if it is no object, has a key twice, or exceeds a limit.
  static ConfigReader Parse(std::string file_name, std::string_view text);

  ConfigReader(ConfigReader&&) noexcept;
  ConfigReader& operator=(ConfigReader&&) noexcept;
  ~ConfigReader();

  const std::string& file_name() const;

  // Present and not null. Does not mark the field as read; nor does IsNull, which is true if it is
  // present and null.
  bool Has(std::string_view name) const;
  bool IsNull(std::string_view name) const;
  // Present and a string. Does not mark the field as read.
  bool IsText(std::string_view name) const;

  // Names of all fields, sorted; marks none of them.
  std::vector<std::string> Names() const;
  // The same in the order of the file, for lists of rules of which the first counts.
  std::vector<std::string> NamesInOrder() const;

  // Whole numbers in [min, max]. 8.0 is refused: a count that was written as a float was computed
  // by something that we do not know.
  size_t Count(std::string_view name, size_t min, size_t max);
  size_t Count(std::string_view name, size_t min, size_t max, size_t default_value);
  std::optional<size_t> OptionalCount(std::string_view name, size_t min, size_t max);

  // Whole or fractional numbers in [min, max].
  double Number(std::string_view name, double min, double max);
  double Number(std::string_view name, double min, double max, double default_value);
  std::optional<double> OptionalNumber(std::string_view name, double min, double max);

  // true or false; 0 and 1 are refused.
  bool Flag(std::string_view name);
  bool Flag(std::string_view name, bool default_value);

  std::string Text(std::string_view name);
  std::string Text(std::string_view name, std::string_view default_value);

  // An array, or a single number as an array of one (eos_token_id comes both ways).
  std::vector<size_t> Counts(std::string_view name, size_t min, size_t max);
  std::vector<size_t> Counts(std::string_view name, size_t min, size_t max,
                             std::vector<size_t> default_value);

  // Arrays; a single value is refused.
  std::vector<double> Numbers(std::string_view name, double min, double max);
  std::vector<std::string> Texts(std::string_view name);

  // A field that is an object. Finish of this reader checks the fields of that one too and calls
  // them "name.field".
  ConfigReader Object(std::string_view name);

  // Known, and without effect on inference. Names that are absent are skipped.
  void Ignore(std::initializer_list<std::string_view> names);

  // Throws kUnsupported naming the file, the field and its value: valid, but nothing that we can
  // do.
  [[noreturn]] void Refuse(std::string_view name, std::string_view why) const;

  // Errors: kUnsupported naming every field, here and in the objects that were read, that nobody
  //   read.
  void Finish() const;

 private:
  struct Node;
  struct Document;
  class Builder;

  ConfigReader(std::shared_ptr<Document> document, Node* node, std::string prefix);

  Node* Find(std::string_view name) const;
  // Find, marked as read; nullptr if absent or null.
  Node* Use(std::string_view name);
  // Use, but an absent field is an error.
  Node& Require(std::string_view name, std::string_view expected);
  std::string PathOf(std::string_view name) const { return prefix_ + std::string(name); }
  [[noreturn]] void ThrowWrong(std::string_view path, std::string_view expected,
                               const Node& found) const;
  size_t ToCount(std::string_view path, const Node& node, size_t min, size_t max) const;
  double ToNumber(std::string_view path, const Node& node, double min, double max) const;

  std::shared_ptr<Document> document_;
  Node* node_;          // an object inside *document_
  std::string prefix_;  // "" or "rope_scaling."
};

}  // namespace switchyard
