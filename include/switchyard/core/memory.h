// Large blocks of memory from the system, with big pages where it gives them.
#pragma once

#include <cstddef>
#include <span>

namespace switchyard {

// kSmall: those that the system has anyway, mostly 4 KiB.
enum class PageSize { kBig, kSmall };

// An anonymous mapping: zero pages that are backed by memory when first written. Owns it; moves,
// does not copy.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Asks for 2 MiB pages (madvise), which raises the read bandwidth by 10-20 %, or against them: a
  // page lies on one NUMA node.
  // Errors: kResourceExhausted naming `what` and the bytes, when the system refuses.
  MappedMemory(size_t bytes, const char* what, PageSize pages = PageSize::kBig);
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  ~MappedMemory();

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

  // Gives the pages of [offset, offset + bytes) back to the system; they read as zero afterwards.
  void Release(size_t offset, size_t bytes);

 private:
  std::byte* data_ = nullptr;  // aligned to 2 MiB
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

// Resident memory of this process in bytes now, and the most it ever was (0 where the system does
// not tell).
size_t ResidentBytes();
size_t PeakResidentBytes();

// Memory that new allocations can use without swapping, limited by the cgroup (0 where the system
// does not tell).
size_t AvailableBytes();

}  // namespace switchyard
