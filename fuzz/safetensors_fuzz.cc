// Any bytes as a safetensors file: refused with switchyard::Error, or every byte of every tensor
// can be read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "switchyard/core/error.h"
#include "switchyard/model/safetensors.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void ReadAll(std::span<const std::byte> bytes) {
  const auto file = switchyard::SafetensorsFile::Parse("fuzz.safetensors", bytes);
  size_t num_bytes = 0;
  unsigned sum = 0;
  for (const switchyard::TensorInfo& info : file.tensors()) {
    Require(file.Find(info.name) == &info);
    const switchyard::TensorView view = file.View(info);
    Require(view.data != nullptr);
    Require(reinterpret_cast<uintptr_t>(view.data) % switchyard::DTypeBytes(view.dtype) == 0 ||
            view.NumBytes() == 0);
    Require(view.NumBytes() == info.end - info.begin);
    for (size_t i = 0; i < view.NumBytes(); ++i) sum += static_cast<unsigned>(view.data[i]);
    num_bytes += view.NumBytes();
  }
  // Nothing is described twice and nothing is left out.
  Require(num_bytes == file.data_bytes());
  volatile unsigned sink = sum;
  (void)sink;
}

void ParseAny(std::span<const std::byte> bytes) {
  try {
    ReadAll(bytes);
  } catch (const switchyard::Error& error) {
    Require(error.code() == switchyard::ErrorCode::kCorruptData ||
            error.code() == switchyard::ErrorCode::kUnsupported);
    Require(error.message().starts_with("fuzz.safetensors: "));
    Require(error.message().size() < 2000);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // At two positions relative to the alignment, each in memory of its own: the input may have room
  // behind it.
  for (size_t misalignment : {size_t{0}, size_t{1}}) {
    const auto copy = std::make_unique<std::byte[]>(misalignment + size);
    std::byte* bytes = copy.get() + misalignment;
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(data[i]);
    ParseAny({bytes, size});

    // Again with a header that ends at the last brace: most changes to a header also change its
    // length, and would otherwise never be looked at.
    size_t end = size;
    while (end > 8 && data[end - 1] != '}') --end;
    if (end <= 8) continue;
    for (size_t i = 0; i < 8; ++i) {
      bytes[i] = static_cast<std::byte>(static_cast<uint64_t>(end - 8) >> (8 * i) & 0xff);
    }
    ParseAny({bytes, size});
  }
  return 0;
}
