// A warm decode call allocates nothing, from nobody: every operator new of the program is counted.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "testing/moe_case.h"
#include "testing/random.h"

namespace {
std::atomic<size_t> allocations{0};
}

void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  ++allocations;
  const auto align = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(align, (bytes + align - 1) / align * align)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes);
}
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  ++allocations;
  const auto align = static_cast<size_t>(alignment);
  return std::aligned_alloc(align, (bytes + align - 1) / align * align);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace switchyard::moe {
namespace {

TEST(Allocation, AWarmCallAllocatesNothing) {
  auto random = testing::MakeRandom(31);
  const testing::MoeCase weights(8, 48, 24, DType::kBF16, random);
  MoeLayerConfig config;
  config.topk.num_experts = 8;
  config.topk.top_k = 2;
  ThreadPool pool(2);
  Arena arena;
  ExecContext context{pool, arena};
  for (const char* act_dtype : {"f32", "bf16"}) {
    MoeLayer layer(BuiltinRegistry(), config, {.runner = "aiter", .act_dtype = act_dtype},
                   weights.Weights());
    for (size_t tokens : {1u, 5u}) {
      const std::vector<float> hidden = testing::RandomFloats(random, tokens * 48);
      const std::vector<float> logits = testing::RandomFloats(random, tokens * 8);
      const auto call = [&] {
        arena.Reset();
        layer.Forward(context, ConstRows(hidden.data(), tokens, 48),
                      ConstRows(logits.data(), tokens, 8));
      };
      call();  // the arena takes its blocks
      call();  // and merges them
      const size_t before = allocations;
      for (int i = 0; i < 10; ++i) call();
      EXPECT_EQ(allocations - before, 0u) << act_dtype << ", " << tokens << " tokens";
    }
  }
}

}  // namespace
}  // namespace switchyard::moe
