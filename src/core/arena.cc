#include "switchyard/core/arena.h"

#include <fmt/format.h>

#include <algorithm>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

constexpr size_t kSmallestBlock = size_t{1} << 20;
// Rows of activations are far apart: in small pages every row of a tile would need a TLB entry.
constexpr size_t kSmallestMapping = size_t{4} << 20;
constexpr size_t kLargestBlock = size_t{1} << 46;  // no machine has more, and sums cannot overflow

size_t RoundUp(size_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

}  // namespace

Arena::~Arena() { FreeBlocks(); }

void Arena::FreeBlocks() {
  for (const Block& block : blocks_) {
    if (block.mapped.size() == 0) ::operator delete(block.data, std::align_val_t{kAlignment});
  }
  blocks_.clear();
}

void Arena::AddBlock(size_t bytes) {
  if (bytes >= kSmallestMapping) {
    MappedMemory mapped(bytes, "scratch memory");
    std::byte* data = mapped.data();
    blocks_.push_back({data, bytes, std::move(mapped)});
  } else {
    void* data = ::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow);
    if (data == nullptr) {
      throw Error(
          ErrorCode::kResourceExhausted,
          fmt::format("out of memory: {} bytes for scratch memory could not be allocated", bytes));
    }
    blocks_.push_back({static_cast<std::byte*>(data), bytes, {}});
  }
  ++num_system_allocations_;
}

void* Arena::Allocate(size_t bytes) {
  // One alignment unit more than asked for, so that a vector load at the last element stays inside.
  if (bytes > kLargestBlock) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("scratch memory of {} bytes was asked for", bytes));
  }
  const size_t need = RoundUp(bytes) + kAlignment;
  while (current_ < blocks_.size() && used_ + need > blocks_[current_].bytes) {
    ++current_;
    used_ = 0;
  }
  if (current_ == blocks_.size()) AddBlock(std::max({need, kSmallestBlock, capacity_bytes()}));
  std::byte* result = blocks_[current_].data + used_;
  used_ += need;
  return result;
}

void Arena::RewindTo(Mark mark) {
  current_ = mark.block;
  used_ = mark.used;
}

void Arena::Reset() {
  current_ = 0;  // first: AddBlock may throw
  used_ = 0;
  if (blocks_.size() > 1) {
    const size_t total = capacity_bytes();
    FreeBlocks();
    AddBlock(total);
  }
}

size_t Arena::capacity_bytes() const {
  size_t total = 0;
  for (const Block& block : blocks_) total += block.bytes;
  return total;
}

}  // namespace switchyard
