#include "replay/case.h"

namespace switchyard::replay {

KindOutput ReplayDispatch(const KindInput& input) {
  KindOutput output;
  output.skipped = input.file.Text("protocol") + " is not replayed yet";
  return output;
}

}  // namespace switchyard::replay
