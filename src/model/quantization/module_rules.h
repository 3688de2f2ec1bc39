// Which modules of a model a line of a quantisation config means.
#pragma once

#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// A regular expression as Python's re.match applies it: from the beginning of the name, not
// necessarily to its end. Matching takes polynomial time, whatever the expression.
class ModuleRegex {
 public:
  // Errors: kUnsupported naming the expression, if it is longer than 500 bytes or is none that the
  //   standard library reads.
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

// A list of modules in the spelling of compressed-tensors: "re:EXPRESSION", "Linear" (all of
// them), or names as NamesModule takes them.
class ModuleList {
 public:
  ModuleList() = default;
  // Errors: those of ModuleRegex.
  explicit ModuleList(std::vector<std::string> lines);
  bool Contains(std::string_view module) const;
  bool empty() const { return lines_.empty(); }

 private:
  std::vector<std::string> lines_;  // those that are no expressions
  std::vector<ModuleRegex> expressions_;
};

}  // namespace switchyard
