// Any text as a configuration: refused with switchyard::Error, or every getter either reads a field
// or refuses it.
//
// The input is the text alone, so that real configurations are seeds; which getter reads a field
// follows from its name.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "model/config_reader.h"
#include "switchyard/core/error.h"

namespace {

using switchyard::ConfigReader;
using switchyard::ErrorCode;

void Require(bool condition) {
  if (!condition) std::abort();
}

// The call may throw Error with this code and nothing else. Whether it did not throw.
bool MayRefuse(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const switchyard::Error& error) {
    Require(error.code() == code);
    Require(error.message().starts_with("config.json: "));
    Require(error.message().size() < 100'000);
    return false;
  }
}

// Applies every getter to a field. All are tried, whatever type it has.
void TryGetters(ConfigReader& reader, const std::string& name) {
  const auto try_one = [](const std::function<void()>& call) {
    return MayRefuse(ErrorCode::kCorruptData, call);
  };
  const bool has = reader.Has(name);
  Require(!(has && reader.IsNull(name)));
  const bool is_count = try_one([&] { reader.Count(name, 0, 1'000'000); });
  const bool is_number = try_one([&] { reader.Number(name, -1e9, 1e9); });
  Require(is_number || !is_count);
  const bool is_flag = try_one([&] { reader.Flag(name); });
  const bool is_text = try_one([&] { reader.Text(name); });
  const bool is_object = try_one([&] { reader.Object(name); });
  Require(is_number + is_flag + is_text + is_object <= 1);
  Require(has || is_number + is_flag + is_text + is_object == 0);
  try_one([&] { reader.Counts(name, 1, 1000); });
  try_one([&] { reader.Counts(name, 1, 1000, {7}); });
  try_one([&] { reader.Numbers(name, 0, 1); });
  try_one([&] { reader.Texts(name); });
  try_one([&] { reader.OptionalCount(name, 0, 10); });
  try_one([&] { reader.OptionalNumber(name, 0, 0.5); });
  // With a default only a wrong value is refused, never an absent one.
  const bool takes_default = try_one([&] { reader.Count(name, 0, 1, 1); });
  Require(has || takes_default);
  try_one([&] { reader.Flag(name, true); });
  try_one([&] { reader.Text(name, "default"); });
}

void Visit(ConfigReader& reader) {
  for (const std::string& name : reader.Names()) {
    switch (std::hash<std::string>()(name) % 8) {
      case 0: continue;  // unread, for Finish
      case 1: reader.Ignore({name}); continue;
      case 2: MayRefuse(ErrorCode::kUnsupported, [&] { reader.Refuse(name, "fuzz"); }); break;
      default: break;
    }
    TryGetters(reader, name);
    // Recursion ends at ConfigReader::kMaxDepth.
    MayRefuse(ErrorCode::kCorruptData, [&] {
      ConfigReader sub = reader.Object(name);
      Visit(sub);
    });
  }
  TryGetters(reader, "absent from every seed");
  MayRefuse(ErrorCode::kUnsupported, [&] { reader.Finish(); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // In memory of its own: the input may have room behind it.
  const auto copy = std::make_unique<char[]>(size);
  for (size_t i = 0; i < size; ++i) copy[i] = static_cast<char>(data[i]);
  MayRefuse(ErrorCode::kCorruptData, [&] {
    ConfigReader config = ConfigReader::Parse("config.json", std::string_view(copy.get(), size));
    Visit(config);
    config.Ignore({"a", ""});
  });
  return 0;
}
