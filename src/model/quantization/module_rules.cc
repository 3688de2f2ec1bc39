#include "model/quantization/module_rules.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/config_reader.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

constexpr size_t kMaxExpression = 500;
// Characters times repetitions: as many states as an automaton may step through for each character
// of a name.
constexpr size_t kMaxStates = 4096;

// ECMAScript is what Python's expressions look like, as far as names of modules need them.
std::regex_constants::syntax_option_type Syntax() {
#ifdef __GLIBCXX__
  // Breadth first: no backtracking that grows exponentially, no recursion per character.
  return std::regex_constants::ECMAScript | std::regex_constants::__polynomial;
#else
  return std::regex_constants::ECMAScript;
#endif
}

// What an expression costs, from its text alone.
struct Cost {
  size_t states = 0;     // that counted repetitions make of its characters, at most
  size_t lookahead = 0;  // how deep look-aheads stand in one another
};

Cost CostOf(std::string_view expression) {
  // Above kMaxStates it does not matter by how much.
  const auto number = [&](size_t& i) {
    size_t value = 0;
    for (; i < expression.size() && expression[i] >= '0' && expression[i] <= '9'; ++i)
      value = std::min<size_t>(value * 10 + static_cast<size_t>(expression[i] - '0'), 1u << 20);
    return value;
  };
  Cost cost;
  size_t repeats = 1, depth = 0;
  bool in_class = false;
  std::vector<bool> groups;  // that are open: whether they are look-aheads
  for (size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\') {
      ++i;
    } else if (in_class) {
      in_class = c != ']';
    } else if (c == '[') {
      in_class = true;
    } else if (c == '(') {
      const std::string_view kind = expression.substr(i + 1, 2);
      groups.push_back(kind == "?=" || kind == "?!");
      depth += groups.back() ? 1 : 0;
      cost.lookahead = std::max(cost.lookahead, depth);
    } else if (c == ')' && !groups.empty()) {
      depth -= groups.back() ? 1 : 0;
      groups.pop_back();
    } else if (c == '{') {
      size_t most = number(++i);
      if (i < expression.size() && expression[i] == ',') most = std::max(most, number(++i));
      repeats = std::min<size_t>(repeats * std::max<size_t>(1, most), 1u << 20);
    }
  }
  cost.states = expression.size() * repeats;
  return cost;
}

std::regex Compile(std::string_view expression) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the quantisation config names modules by the expression {}: {}",
                            QuoteForMessage(expression), why));
  };
  if (expression.size() > kMaxExpression)
    refuse(fmt::format("longer than {} bytes", kMaxExpression));
  const Cost cost = CostOf(expression);
  if (cost.states > kMaxStates) refuse("its parts are repeated too often");
  if (cost.lookahead > 1) refuse("it looks ahead inside a look-ahead, which takes too long");
  try {
    return std::regex(expression.begin(), expression.end(), Syntax());
  } catch (const std::regex_error& error) {
    refuse(error.what());
  }
  return {};
}

}  // namespace

ModuleRegex::ModuleRegex(std::string_view expression) : regex_(Compile(expression)) {}

bool ModuleRegex::Matches(std::string_view module) const {
  return std::regex_search(module.begin(), module.end(), regex_,
                           std::regex_constants::match_continuous);
}

bool MatchesGlob(std::string_view glob, std::string_view name) {
  // The last '*' so far, and where what it stands for ends: enough to go back to.
  size_t g = 0, n = 0, star = std::string_view::npos, resume = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = n;
    } else if (g < glob.size() && glob[g] == name[n]) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

bool NamesModule(std::string_view line, std::string_view module) {
  if (line.empty()) return false;
  if (line.find('*') != std::string_view::npos)
    return MatchesGlob(line, module) || MatchesGlob(fmt::format("{}.*", line), module);
  for (size_t at = module.find(line); at != std::string_view::npos;
       at = module.find(line, at + 1)) {
    const size_t end = at + line.size();
    if ((at == 0 || module[at - 1] == '.') && (end == module.size() || module[end] == '.'))
      return true;
  }
  return false;
}

ModuleList::ModuleList(std::vector<std::string> lines) {
  constexpr std::string_view kExpression = "re:";
  for (std::string& line : lines) {
    if (line.starts_with(kExpression)) {
      expressions_.emplace_back(std::string_view(line).substr(kExpression.size()));
    } else if (line == "Linear") {
      has_class_ = true;
    } else {
      lines_.push_back(std::move(line));
    }
  }
}

bool ModuleList::Names(std::string_view module) const {
  return std::ranges::any_of(
             lines_, [&](const std::string& line) { return NamesModule(line, module); }) ||
         std::ranges::any_of(expressions_,
                             [&](const ModuleRegex& regex) { return regex.Matches(module); });
}

}  // namespace switchyard
