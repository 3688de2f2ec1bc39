#include "switchyard/core/macros.h"

#include <fmt/format.h>

#include "switchyard/core/error.h"

namespace switchyard::internal {

void CheckFailed(const char* file, int line, const char* condition) {
  throw Error(ErrorCode::kInternal, fmt::format("{}:{}: check failed: {}", file, line, condition));
}

void CheckFailed(const char* file, int line, const char* condition, long long left,
                 long long right) {
  throw Error(ErrorCode::kInternal, fmt::format("{}:{}: check failed: {} ({} against {})", file,
                                                line, condition, left, right));
}

}  // namespace switchyard::internal
