#include "switchyard/core/log.h"

#include <utility>

namespace switchyard {
namespace {

struct Sink {
  LogSink write;
  LogLevel lowest = LogLevel::kInfo;
};

Sink& GlobalSink() {
  static Sink sink;
  return sink;
}

}  // namespace

void SetLogSink(LogSink sink, LogLevel lowest) { GlobalSink() = {std::move(sink), lowest}; }

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  const Sink& sink = GlobalSink();
  if (sink.write && level >= sink.lowest) sink.write(level, message, fields);
}

}  // namespace switchyard
