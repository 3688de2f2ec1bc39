#include "switchyard/text/stop_matcher.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace switchyard {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
}

std::string StopMatcher::Add(std::string_view text) {
  if (stopped_) return "";
  held_ += text;
  return Take(true);
}

std::string StopMatcher::Finish() { return stopped_ ? "" : Take(false); }

// Gives out held_ up to the first place where a stop begins, or where `more` text could complete
// one.
std::string StopMatcher::Take(bool more) {
  size_t end = 0;
  for (; end < held_.size(); ++end) {
    const std::string_view rest = std::string_view(held_).substr(end);
    bool possible = false;
    for (const std::string& stop : stops_) {
      if (rest.starts_with(stop)) {
        stopped_ = true;
        held_.resize(end);
        return std::exchange(held_, "");
      }
      possible = possible || (more && std::string_view(stop).starts_with(rest));
    }
    if (possible) break;
  }
  std::string ready = held_.substr(0, end);
  held_.erase(0, end);
  return ready;
}

}  // namespace switchyard
