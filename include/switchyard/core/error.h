// The one exception type of the library, and the table that maps its codes to exit status and HTTP
// status.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace switchyard {

// What kind of failure it is. Callers branch on the code; people read the message.
enum class ErrorCode {
  kInvalidArgument,  // the caller asked for something that can never work (option, shape, request
                     // field)
  kFailedPrecondition,  // right call, wrong time or state (combine before dispatch)
  kNotFound,            // a file, tensor, model or registry key does not exist
  kCorruptData,         // a file contradicts itself or its format
  kUnsupported,         // valid, but this build or CPU cannot do it
  kResourceExhausted,   // memory, KV blocks, or a limit of a format
  kUnavailable,         // a peer or service is gone
  kCancelled,           // the user stopped it
  kInternal,            // a promise of our own was broken: a bug
};

// Anything that a user, file, request or peer can cause. The message says what failed, where, what
// was expected and what was found, and the remedy where there is one. The library never prints and
// never ends the process.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  ErrorCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorCode code_;
  std::string message_;
};

// "invalid argument", "corrupt data", …
std::string_view ErrorCodeName(ErrorCode code);

// Process exit status of the CLI: 2 for kInvalidArgument raised by option parsing is the CLI's own
// affair; every Error that reaches main exits 1.
int ErrorExitStatus(ErrorCode code);

// HTTP status that a server answers with.
int ErrorHttpStatus(ErrorCode code);

}  // namespace switchyard
