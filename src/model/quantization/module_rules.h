// Which modules of a model a line of a quantisation config means.
#pragma once

#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// A regular expression as Python's re.match applies it: from the beginning of the name, not
// necessarily to its end. Matching a name takes well under a second, whatever the expression.
class ModuleRegex {
 public:
  // Errors: kUnsupported naming the expression, if it is longer than 500 bytes, is none that the
  //   standard library reads, repeats its parts too often, or looks ahead inside a look-ahead.
  explicit ModuleRegex(std::string_view expression);
  bool Matches(std::string_view module) const;

 private:
  std::regex regex_;
};

// Whether `glob`, in which '*' stands for anything, is the whole name.
bool MatchesGlob(std::string_view glob, std::string_view name);

// Whether a module is named by its whole path, by some consecutive parts of it ("gate",
// "mlp.gate", "lm_head"), or by a glob over its beginning ("model.layers.*.self_attn").
bool NamesModule(std::string_view line, std::string_view module);

// A list of modules in the spelling of compressed-tensors: "re:EXPRESSION", a class of layers
// ("Linear", which all are), or names as NamesModule takes them.
class ModuleList {
 public:
  ModuleList() = default;
  // Errors: those of ModuleRegex.
  explicit ModuleList(std::vector<std::string> lines);
  // By its name, or because all are.
  bool Contains(std::string_view module) const { return has_class_ || Names(module); }
  // By its name or an expression.
  bool Names(std::string_view module) const;
  // By its class.
  bool has_class() const { return has_class_; }

 private:
  std::vector<std::string> lines_;  // those that are no expressions
  std::vector<ModuleRegex> expressions_;
  bool has_class_ = false;
};

}  // namespace switchyard
