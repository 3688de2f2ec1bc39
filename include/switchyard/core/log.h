// Logging through one settable sink; off by default, so that a program that links the library
// prints nothing.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

namespace switchyard {

// Ordered: a sink takes its lowest level and everything above.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// One key=value of a line; keys such as rank, request_id, layer.
struct LogField {
  std::string_view key;
  std::string value;
};

using LogSink =
    std::function<void(LogLevel, std::string_view message, std::initializer_list<LogField>)>;

// Installs the sink and the lowest level that reaches it. An empty sink turns logging off. Call
// before other threads log; the CLI and the server do it first thing.
void SetLogSink(LogSink sink, LogLevel lowest);

// Passes one line to the sink. Never called inside kernels or once per token; prompts and outputs
// are never logged.
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

}  // namespace switchyard
