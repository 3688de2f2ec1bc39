// Stop strings in streamed text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// Passes text on up to the earliest stop string, however it is cut into pieces. Of the stops that
// match, the one that begins first counts, whichever ends first in the stream; so text is held back
// while any stop could still begin there.
class StopMatcher {
 public:
  // Empty stop strings are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  // Text that is certainly before any stop. Once stopped, nothing.
  std::string Add(std::string_view text);

  // A stop string was found; the text before it is out, and everything after it is dropped.
  bool stopped() const { return stopped_; }

  // What was held back, if no stop came; up to the stop, if one was complete but hid behind an
  // earlier one that was not.
  std::string Finish();

 private:
  std::string Take(bool more);

  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace switchyard
