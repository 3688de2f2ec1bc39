#include "model/config_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// Values are shown up to this length in messages.
constexpr size_t kMaxShownBytes = 80;

// Length of the UTF-8 sequence at the start of `text`, 0 if there is none. RFC 3629: no surrogates,
// no long forms.
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto is_tail = [&](size_t i) { return i < text.size() && (byte(i) & 0xc0) == 0x80; };
  if (text.empty()) return 0;
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return is_tail(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    if (!is_tail(1) || !is_tail(2)) return 0;
    if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) > 0x9f)) return 0;
    return 3;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    if (!is_tail(1) || !is_tail(2) || !is_tail(3)) return 0;
    if ((lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) > 0x8f)) return 0;
    return 4;
  }
  return 0;
}

// Appends `text` without control characters and bytes that are not UTF-8, and "..." where it is
// cut.
void AppendClean(std::string& out, std::string_view text, size_t max_bytes, bool escapes_quotes) {
  size_t i = 0;
  while (i < text.size()) {
    const size_t length = Utf8Length(text.substr(i));
    if (i + std::max<size_t>(length, 1) > max_bytes) {
      out += "...";
      return;
    }
    const char c = text[i];
    if (length == 0 || static_cast<uint8_t>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
      ++i;
      continue;
    }
    if (escapes_quotes && (c == '"' || c == '\\')) out += '\\';
    out.append(text.substr(i, length));
    i += length;
  }
}

}  // namespace

std::string QuoteForMessage(std::string_view text, size_t max_bytes) {
  std::string quoted = "\"";
  AppendClean(quoted, text, max_bytes, true);
  quoted += '"';
  return quoted;
}

std::string CleanJsonError(std::string_view what) {
  constexpr std::string_view kEndOfTag = "] ";
  if (const size_t tag = what.find(kEndOfTag); what.starts_with('[') && tag != what.npos) {
    what.remove_prefix(tag + kEndOfTag.size());
  }
  std::string clean;
  AppendClean(clean, what, 300, false);
  return clean;
}

// One value of the document. A tree of our own rather than nlohmann::json, because each field
// carries marks, duplicate keys must be seen, and numbers are shown as they were written.
struct ConfigReader::Node {
  enum class Kind : uint8_t { kNull, kFlag, kCount, kNumber, kText, kArray, kObject };

  Kind kind = Kind::kNull;
  bool is_true = false;    // of a kFlag
  bool is_read = false;    // or ignored
  bool is_opened = false;  // by Object(): Finish looks inside
  double number = 0;       // of a kCount or kNumber; finite
  size_t count = 0;        // of a kCount
  size_t position = 0;     // among the values of the document
  std::string key;         // inside an object
  std::string text;        // of a kText its value, of a number its digits as they stand in the file
  std::vector<Node> children;  // of an object sorted by key

  // As JSON, cut after about `max_bytes`.
  std::string Show(size_t max_bytes = kMaxShownBytes) const {
    std::string out;
    AppendTo(out, max_bytes);
    if (out.size() <= max_bytes) return out;
    // Not in the middle of a character.
    size_t end = 0;
    while (true) {
      const size_t length = Utf8Length(std::string_view(out).substr(end));
      if (length == 0 || end + length > max_bytes) break;
      end += length;
    }
    return out.substr(0, end) + "...";
  }

 private:
  // Stops soon after `max_bytes`: how much is written does not depend on the size of the value.
  void AppendTo(std::string& out, size_t max_bytes) const {
    switch (kind) {
      case Kind::kNull: out += "null"; return;
      case Kind::kFlag: out += is_true ? "true" : "false"; return;
      case Kind::kCount:
      case Kind::kNumber: out += text; return;
      case Kind::kText: out += QuoteForMessage(text, max_bytes); return;
      case Kind::kArray:
      case Kind::kObject: break;
    }
    const bool is_object = kind == Kind::kObject;
    out += is_object ? '{' : '[';
    for (const Node& child : children) {
      if (&child != &children.front()) out += ", ";
      if (is_object) out += QuoteForMessage(child.key, max_bytes) + ": ";
      child.AppendTo(out, max_bytes);
      if (out.size() > max_bytes) return;
    }
    out += is_object ? '}' : ']';
  }
};

struct ConfigReader::Document {
  std::string file_name;
  Node root;
};

// Receives the events of nlohmann's parser, which does not recurse, and builds the tree. The depth
// limit also bounds the recursion of Show and of the destructor.
class ConfigReader::Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(Document& document, std::string_view text) : document_(document), text_(text) {}

  bool null() override {
    Add(Node::Kind::kNull);
    return true;
  }
  bool boolean(bool value) override {
    Add(Node::Kind::kFlag).is_true = value;
    return true;
  }
  bool number_integer(number_integer_t value) override {
    Node& node = Add(Node::Kind::kNumber);
    node.number = static_cast<double>(value);
    node.text = value == 0 ? "-0" : std::to_string(value);
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    Node& node = Add(Node::Kind::kCount);
    node.number = static_cast<double>(value);
    node.count = value;
    node.text = std::to_string(value);
    return true;
  }
  bool number_float(number_float_t value, const string_t& digits) override {
    Node& node = Add(Node::Kind::kNumber);
    node.number = value;
    node.text = digits;
    return true;
  }
  bool string(string_t& value) override {
    Add(Node::Kind::kText).text = std::move(value);
    return true;
  }
  bool binary(binary_t&) override { return true; }  // not in text

  bool start_object(size_t) override { return Open(Node::Kind::kObject); }
  bool start_array(size_t) override { return Open(Node::Kind::kArray); }
  bool key(string_t& name) override {
    key_ = std::move(name);
    return true;
  }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool end_object() override {
    std::vector<Node>& fields = open_.back()->children;
    std::sort(fields.begin(), fields.end(),
              [](const Node& a, const Node& b) { return a.key < b.key; });
    const auto twice = std::adjacent_find(
        fields.begin(), fields.end(), [](const Node& a, const Node& b) { return a.key == b.key; });
    if (twice != fields.end()) {
      std::string path;
      for (const Node* node : open_) {
        if (!node->key.empty()) path += node->key + ".";
      }
      throw Error(
          ErrorCode::kCorruptData,
          fmt::format(
              "{}: field {} is there twice (values {} and {}); which one is meant is not defined",
              document_.file_name, QuoteForMessage(path + twice->key), twice->Show(),
              (twice + 1)->Show()));
    }
    open_.pop_back();
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    std::string reason = CleanJsonError(error.what());
    // nlohmann says where, except of numbers that are too large.
    if (dynamic_cast<const nlohmann::detail::parse_error*>(&error) == nullptr) {
      const std::string_view before = text_.substr(0, position);
      const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0
      reason +=
          fmt::format(" at line {}, column {}", 1 + std::count(before.begin(), before.end(), '\n'),
                      before.size() - line_begin);
    }
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: is not valid JSON: {}", document_.file_name, reason));
  }

 private:
  Node& Add(Node::Kind kind) {
    if (++num_values_ > kMaxValues) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{}: has more than {} values, the most that is read",
                              document_.file_name, kMaxValues));
    }
    // While a value is open its parent gains no other child, so the pointers in open_ stay valid.
    Node* node = &document_.root;
    if (!open_.empty()) {
      node = &open_.back()->children.emplace_back();
      if (open_.back()->kind == Node::Kind::kObject) node->key = std::move(key_);
    }
    node->kind = kind;
    node->position = num_values_;
    return *node;
  }

  bool Open(Node::Kind kind) {
    Node& node = Add(kind);
    open_.push_back(&node);
    if (open_.size() > kMaxDepth) {
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("{}: values are nested more than {} deep, the most that is read",
                              document_.file_name, kMaxDepth));
    }
    return true;
  }

  Document& document_;
  std::string_view text_;
  std::vector<Node*> open_;  // containers from the root to the one being filled
  std::string key_;
  size_t num_values_ = 0;
};

ConfigReader::ConfigReader(std::shared_ptr<Document> document, Node* node, std::string prefix)
    : document_(std::move(document)), node_(node), prefix_(std::move(prefix)) {}
ConfigReader::ConfigReader(ConfigReader&&) noexcept = default;
ConfigReader& ConfigReader::operator=(ConfigReader&&) noexcept = default;
ConfigReader::~ConfigReader() = default;

ConfigReader ConfigReader::Parse(std::string file_name, std::string_view text) {
  auto document = std::make_shared<Document>();
  document->file_name = std::move(file_name);
  if (text.size() > kMaxBytes) {
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: has {} bytes, the most that is read is {}", document->file_name,
                            text.size(), kMaxBytes));
  }
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: is empty, expected a JSON object", document->file_name));
  }
  // nlohmann takes a NUL for the end of the text and would not look at what follows.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: is not valid JSON: NUL at byte {}", document->file_name, nul));
  }
  Builder builder(*document, text);
  nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &builder);
  if (document->root.kind != Node::Kind::kObject) {
    throw Error(ErrorCode::kCorruptData, fmt::format("{}: expected a JSON object, found {}",
                                                     document->file_name, document->root.Show()));
  }
  Node* root = &document->root;
  return ConfigReader(std::move(document), root, "");
}

const std::string& ConfigReader::file_name() const { return document_->file_name; }

ConfigReader::Node* ConfigReader::Find(std::string_view name) const {
  std::vector<Node>& fields = node_->children;
  const auto found =
      std::lower_bound(fields.begin(), fields.end(), name,
                       [](const Node& node, std::string_view key) { return node.key < key; });
  return found != fields.end() && found->key == name ? &*found : nullptr;
}

ConfigReader::Node* ConfigReader::Use(std::string_view name) {
  Node* node = Find(name);
  if (node == nullptr) return nullptr;
  node->is_read = true;
  return node->kind == Node::Kind::kNull ? nullptr : node;
}

ConfigReader::Node& ConfigReader::Require(std::string_view name, std::string_view expected) {
  Node* node = Use(name);
  if (node == nullptr) {
    throw Error(
        ErrorCode::kCorruptData,
        fmt::format("{}: field {} is {}, expected {}", file_name(), QuoteForMessage(PathOf(name)),
                    Find(name) != nullptr ? "null" : "missing", expected));
  }
  return *node;
}

void ConfigReader::ThrowWrong(std::string_view path, std::string_view expected,
                              const Node& found) const {
  throw Error(ErrorCode::kCorruptData,
              fmt::format("{}: field {}: expected {}, found {}", file_name(), QuoteForMessage(path),
                          expected, found.Show()));
}

namespace {

std::string DescribeCount(size_t min, size_t max) {
  return fmt::format("a whole number from {} to {}", min, max);
}
std::string DescribeNumber(double min, double max) {
  return fmt::format("a number from {} to {}", min, max);
}

}  // namespace

size_t ConfigReader::ToCount(std::string_view path, const Node& node, size_t min,
                             size_t max) const {
  if (node.kind != Node::Kind::kCount || node.count < min || node.count > max) {
    ThrowWrong(path, DescribeCount(min, max), node);
  }
  return node.count;
}

double ConfigReader::ToNumber(std::string_view path, const Node& node, double min,
                              double max) const {
  const bool is_number = node.kind == Node::Kind::kCount || node.kind == Node::Kind::kNumber;
  if (!is_number || !(node.number >= min && node.number <= max)) {
    ThrowWrong(path, DescribeNumber(min, max), node);
  }
  return node.number;
}

bool ConfigReader::Has(std::string_view name) const {
  const Node* node = Find(name);
  return node != nullptr && node->kind != Node::Kind::kNull;
}

bool ConfigReader::IsNull(std::string_view name) const {
  const Node* node = Find(name);
  return node != nullptr && node->kind == Node::Kind::kNull;
}

bool ConfigReader::IsText(std::string_view name) const {
  const Node* node = Find(name);
  return node != nullptr && node->kind == Node::Kind::kText;
}

std::vector<std::string> ConfigReader::Names() const {
  std::vector<std::string> names;
  names.reserve(node_->children.size());
  for (const Node& field : node_->children) names.push_back(field.key);
  return names;
}

std::vector<std::string> ConfigReader::NamesInOrder() const {
  std::vector<const Node*> fields;
  for (const Node& field : node_->children) fields.push_back(&field);
  std::ranges::sort(fields, {}, &Node::position);
  std::vector<std::string> names;
  names.reserve(fields.size());
  for (const Node* field : fields) names.push_back(field->key);
  return names;
}

size_t ConfigReader::Count(std::string_view name, size_t min, size_t max) {
  return ToCount(PathOf(name), Require(name, DescribeCount(min, max)), min, max);
}

std::optional<size_t> ConfigReader::OptionalCount(std::string_view name, size_t min, size_t max) {
  const Node* node = Use(name);
  if (node == nullptr) return std::nullopt;
  return ToCount(PathOf(name), *node, min, max);
}

size_t ConfigReader::Count(std::string_view name, size_t min, size_t max, size_t default_value) {
  return OptionalCount(name, min, max).value_or(default_value);
}

double ConfigReader::Number(std::string_view name, double min, double max) {
  return ToNumber(PathOf(name), Require(name, DescribeNumber(min, max)), min, max);
}

std::optional<double> ConfigReader::OptionalNumber(std::string_view name, double min, double max) {
  const Node* node = Use(name);
  if (node == nullptr) return std::nullopt;
  return ToNumber(PathOf(name), *node, min, max);
}

double ConfigReader::Number(std::string_view name, double min, double max, double default_value) {
  return OptionalNumber(name, min, max).value_or(default_value);
}

bool ConfigReader::Flag(std::string_view name) {
  constexpr std::string_view kExpected = "true or false";
  const Node& node = Require(name, kExpected);
  if (node.kind != Node::Kind::kFlag) ThrowWrong(PathOf(name), kExpected, node);
  return node.is_true;
}

bool ConfigReader::Flag(std::string_view name, bool default_value) {
  return Use(name) == nullptr ? default_value : Flag(name);
}

std::string ConfigReader::Text(std::string_view name) {
  constexpr std::string_view kExpected = "a string";
  const Node& node = Require(name, kExpected);
  if (node.kind != Node::Kind::kText) ThrowWrong(PathOf(name), kExpected, node);
  return node.text;
}

std::string ConfigReader::Text(std::string_view name, std::string_view default_value) {
  return Use(name) == nullptr ? std::string(default_value) : Text(name);
}

std::vector<size_t> ConfigReader::Counts(std::string_view name, size_t min, size_t max) {
  const std::string expected = DescribeCount(min, max) + ", or an array of such numbers";
  const Node& node = Require(name, expected);
  if (node.kind == Node::Kind::kCount) return {ToCount(PathOf(name), node, min, max)};
  if (node.kind != Node::Kind::kArray) ThrowWrong(PathOf(name), expected, node);
  std::vector<size_t> values;
  values.reserve(node.children.size());
  for (const Node& value : node.children) {
    values.push_back(ToCount(fmt::format("{}[{}]", PathOf(name), values.size()), value, min, max));
  }
  return values;
}

std::vector<size_t> ConfigReader::Counts(std::string_view name, size_t min, size_t max,
                                         std::vector<size_t> default_value) {
  return Use(name) == nullptr ? std::move(default_value) : Counts(name, min, max);
}

std::vector<double> ConfigReader::Numbers(std::string_view name, double min, double max) {
  const std::string expected = fmt::format("an array, each value {}", DescribeNumber(min, max));
  const Node& node = Require(name, expected);
  if (node.kind != Node::Kind::kArray) ThrowWrong(PathOf(name), expected, node);
  std::vector<double> values;
  values.reserve(node.children.size());
  for (const Node& value : node.children) {
    values.push_back(ToNumber(fmt::format("{}[{}]", PathOf(name), values.size()), value, min, max));
  }
  return values;
}

std::vector<std::string> ConfigReader::Texts(std::string_view name) {
  constexpr std::string_view kExpected = "an array of strings";
  const Node& node = Require(name, kExpected);
  if (node.kind != Node::Kind::kArray) ThrowWrong(PathOf(name), kExpected, node);
  std::vector<std::string> values;
  values.reserve(node.children.size());
  for (const Node& value : node.children) {
    if (value.kind != Node::Kind::kText) {
      ThrowWrong(fmt::format("{}[{}]", PathOf(name), values.size()), "a string", value);
    }
    values.push_back(value.text);
  }
  return values;
}

ConfigReader ConfigReader::Object(std::string_view name) {
  constexpr std::string_view kExpected = "an object";
  Node& node = Require(name, kExpected);
  if (node.kind != Node::Kind::kObject) ThrowWrong(PathOf(name), kExpected, node);
  node.is_opened = true;
  return ConfigReader(document_, &node, PathOf(name) + ".");
}

void ConfigReader::Ignore(std::initializer_list<std::string_view> names) {
  for (std::string_view name : names) Use(name);
}

void ConfigReader::Refuse(std::string_view name, std::string_view why) const {
  const Node* node = Find(name);
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: field {} ({}): {}", file_name(), QuoteForMessage(PathOf(name)),
                          node != nullptr ? fmt::format("value {}", node->Show()) : "absent", why));
}

void ConfigReader::Finish() const {
  constexpr size_t kMaxListed = 50;
  std::vector<std::string> unknown;
  // Recursion is bounded by kMaxDepth.
  const auto check = [&](const auto& self, const Node& object, const std::string& prefix) -> void {
    for (const Node& field : object.children) {
      if (field.is_opened) {
        self(self, field, prefix + field.key + ".");
      } else if (!field.is_read && field.kind != Node::Kind::kNull) {
        unknown.push_back(
            fmt::format("{} (value {})", QuoteForMessage(prefix + field.key), field.Show()));
      }
    }
  };
  check(check, *node_, prefix_);
  if (unknown.empty()) return;

  std::string list;
  for (size_t i = 0; i < std::min(unknown.size(), kMaxListed); ++i) {
    if (i > 0) list += ", ";
    list += unknown[i];
  }
  if (unknown.size() > kMaxListed) list += fmt::format(" and {} more", unknown.size() - kMaxListed);
  const bool is_one = unknown.size() == 1;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}: {} {}: {} may change the mathematics, so the model is refused", file_name(),
                  is_one ? "unknown field" : fmt::format("{} unknown fields:", unknown.size()),
                  list, is_one ? "it" : "they"));
}

}  // namespace switchyard
