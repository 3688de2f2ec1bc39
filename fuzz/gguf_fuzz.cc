// Any bytes as a GGUF file: refused with switchyard::Error, or every value of every key and every
// byte of every tensor can be read, and the config is read or refused.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "model/gguf_config.h"
#include "switchyard/core/error.h"
#include "switchyard/model/gguf.h"

namespace {

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::GgufFile;

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckError(const Error& error) {
  Require(error.code() == ErrorCode::kCorruptData || error.code() == ErrorCode::kUnsupported);
  Require(error.message().starts_with("fuzz.gguf"));
  Require(error.message().size() < 4000);
}

// The getters that take any type refuse with an error, or give every value.
template <typename Get>
void TryGet(const Get& get) {
  try {
    get();
  } catch (const Error& error) {
    CheckError(error);
  }
}

void ReadAll(std::span<const std::byte> bytes) {
  const GgufFile file = GgufFile::Parse("fuzz.gguf", bytes);
  for (const switchyard::GgufEntry& entry : file.entries()) {
    Require(file.FindEntry(entry.key) == &entry);
    TryGet([&] { Require(file.Texts(entry.key).size() == entry.count); });
    TryGet([&] { Require(file.Counts(entry.key, 0, SIZE_MAX).size() == entry.count); });
    TryGet([&] { Require(file.Numbers(entry.key, -1e30, 1e30).size() == entry.count); });
    TryGet([&] { file.Text(entry.key); });
    TryGet([&] { file.Flag(entry.key); });
    TryGet([&] { file.Count(entry.key, 1, 100); });
  }
  unsigned sum = 0;
  size_t num_bytes = 0;
  for (const switchyard::GgufTensorInfo& info : file.tensors()) {
    Require(file.FindTensor(info.name) == &info);
    const switchyard::TensorView view = file.View(info);
    Require(reinterpret_cast<uintptr_t>(view.data) % 8 == 0);
    Require(view.NumBytes() == info.bytes);
    for (size_t i = 0; i < info.bytes; ++i) sum += static_cast<unsigned>(view.data[i]);
    num_bytes += info.bytes;
  }
  Require(num_bytes <= file.data_bytes());
  volatile unsigned sink = sum;
  (void)sink;
}

void ReadConfig(std::span<const std::byte> bytes) {
  const auto files = switchyard::ModelFiles::FromMemory("fuzz", {{"fuzz.gguf", bytes}});
  const auto model = switchyard::GgufModel::Open(files, "fuzz.gguf");
  const switchyard::ModelConfig config = switchyard::ReadGgufConfig(model);
  Require(config.vocab_size > 0 && config.hidden_size > 0 && config.num_heads > 0);
  Require(config.num_heads % config.num_kv_heads == 0 && config.rope.rotary_dim % 2 == 0);
  Require(config.top_k >= 1 && config.top_k <= config.num_experts);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // In memory of its own: the input may have room behind it.
  const auto copy = std::make_unique<std::byte[]>(size);
  if (size != 0) std::memcpy(copy.get(), data, size);
  try {
    ReadAll({copy.get(), size});
    ReadConfig({copy.get(), size});
  } catch (const Error& error) {
    CheckError(error);
  }
  return 0;
}
