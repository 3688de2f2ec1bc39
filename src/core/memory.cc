#include "switchyard/core/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <utility>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

constexpr size_t kBigPage = size_t{2} << 20;

// First number of a file such as a cgroup limit; 0 when there is none ("max", or no such file).
size_t ReadNumber(const char* path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : 0;
}

size_t MeminfoBytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  size_t kib = 0;
  std::string unit;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name == key) return kib * 1024;
  }
  return 0;
}

}  // namespace

MappedMemory::MappedMemory(size_t bytes, const char* what, PageSize pages) : bytes_(bytes) {
  if (bytes == 0) return;
  mapping_bytes_ = bytes + kBigPage;
  if (mapping_bytes_ > bytes) {
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (mapping_ == MAP_FAILED || mapping_ == nullptr) {
    mapping_ = nullptr;
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("out of memory: {} bytes for {} could not be allocated", bytes, what));
  }
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<std::byte*>((address + kBigPage - 1) / kBigPage * kBigPage);
  // Only advice: a system without big pages refuses it, and all still works.
  madvise(data_, bytes, pages == PageSize::kBig ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept { *this = std::move(other); }

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  return *this;
}

MappedMemory::~MappedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void MappedMemory::Release(size_t offset, size_t bytes) {
  // Whole pages inside the range only.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = (offset + page - 1) / page * page;
  const size_t last = (offset + bytes) / page * page;
  if (first < last) madvise(data_ + first, last - first, MADV_DONTNEED);
}

size_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  return file >> total >> resident ? resident * static_cast<size_t>(sysconf(_SC_PAGESIZE)) : 0;
}

size_t PeakResidentBytes() {
  rusage usage{};
  return getrusage(RUSAGE_SELF, &usage) == 0 ? static_cast<size_t>(usage.ru_maxrss) * 1024 : 0;
}

size_t AvailableBytes() {
  const size_t system = MeminfoBytes("MemAvailable:");
  const size_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const size_t used = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit == 0) return system;
  const size_t left = limit > used ? limit - used : 0;
  return system == 0 ? left : std::min(system, left);
}

}  // namespace switchyard
