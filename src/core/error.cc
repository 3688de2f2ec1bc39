#include "switchyard/core/error.h"

#include <array>

namespace switchyard {
namespace {

struct CodeRow {
  ErrorCode code;
  std::string_view name;
  int exit_status;
  int http_status;
};

// Ordered as the enum, so that a code is its own index.
constexpr std::array kCodes = {
    CodeRow{ErrorCode::kInvalidArgument, "invalid argument", 1, 400},
    CodeRow{ErrorCode::kFailedPrecondition, "failed precondition", 1, 409},
    CodeRow{ErrorCode::kNotFound, "not found", 1, 404},
    CodeRow{ErrorCode::kCorruptData, "corrupt data", 1, 500},
    CodeRow{ErrorCode::kUnsupported, "unsupported", 1, 400},
    CodeRow{ErrorCode::kResourceExhausted, "resource exhausted", 1, 503},
    CodeRow{ErrorCode::kUnavailable, "unavailable", 1, 503},
    CodeRow{ErrorCode::kCancelled, "cancelled", 1, 499},
    CodeRow{ErrorCode::kInternal, "internal error", 1, 500},
};

const CodeRow& Row(ErrorCode code) { return kCodes[static_cast<size_t>(code)]; }

}  // namespace

std::string_view ErrorCodeName(ErrorCode code) { return Row(code).name; }
int ErrorExitStatus(ErrorCode code) { return Row(code).exit_status; }
int ErrorHttpStatus(ErrorCode code) { return Row(code).http_status; }

}  // namespace switchyard
