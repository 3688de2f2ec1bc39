// Scratch memory of one forward pass: bump allocation, freed all at once, no allocation once it is
// warm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "switchyard/core/memory.h"
#include "switchyard/core/rows.h"

namespace switchyard {

// Memory of trivially destructible objects. The first use of a size makes a block; Reset merges the
// blocks into one that is as large as the most that was ever needed, so the second pass of the same
// shape allocates nothing. Not thread-safe: allocate before a parallel region and share the
// pointers.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;

  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Uninitialised, aligned to kAlignment, followed by at least kAlignment readable bytes.
  // Errors: kResourceExhausted, naming the bytes asked for.
  void* Allocate(size_t bytes);

  template <typename T>
  std::span<T> AllocateSpan(size_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    return {static_cast<T*>(Allocate(count * sizeof(T))), count};
  }

  // Uninitialised rows whose stride is `cols`.
  Rows AllocateRows(size_t rows, size_t cols) {
    return Rows(AllocateSpan<float>(rows * cols).data(), rows, cols);
  }

  template <typename T, typename... Args>
  T* New(Args&&... args) {
    static_assert(std::is_trivially_destructible_v<T>, "an arena never runs destructors");
    return new (Allocate(sizeof(T))) T(std::forward<Args>(args)...);
  }

  // A point to return to. Everything allocated after it is free again once RewindTo is called.
  struct Mark {
    size_t block = 0;
    size_t used = 0;
  };
  Mark Now() const { return {current_, used_}; }
  // Frees what was allocated after `mark`; marks must be rewound in reverse order.
  void RewindTo(Mark mark);

  // Frees everything and keeps the memory.
  void Reset();

  // Blocks obtained from the system so far; tests use it to prove that a warm pass allocates
  // nothing.
  size_t num_system_allocations() const { return num_system_allocations_; }
  size_t capacity_bytes() const;

 private:
  struct Block {
    std::byte* data;
    size_t bytes;
    MappedMemory mapped;  // where data is, if it is large; else from operator new
  };
  void AddBlock(size_t bytes);
  void FreeBlocks();

  std::vector<Block> blocks_;
  size_t current_ = 0;  // index into blocks_
  size_t used_ = 0;     // bytes of blocks_[current_]
  size_t num_system_allocations_ = 0;
};

// Rewinds an arena at the end of a scope.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.Now()) {}
  ~ArenaScope() { arena_.RewindTo(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace switchyard
