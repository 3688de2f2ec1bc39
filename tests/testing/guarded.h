// Buffers that end at an unreadable page: a kernel that touches one byte too many stops the test.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

namespace switchyard::testing {

// `count` elements of T whose last byte is the last byte of a page, with a page without access
// right after.
template <typename T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t count) : count_(count) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t data_bytes = (count * sizeof(T) + page - 1) / page * page;
    bytes_ = data_bytes + page;
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    char* end = static_cast<char*>(base_) + data_bytes;
    mprotect(end, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(end - count * sizeof(T));
  }
  explicit GuardedBuffer(const std::vector<T>& values) : GuardedBuffer(values.size()) {
    if (!values.empty()) std::memcpy(data_, values.data(), values.size() * sizeof(T));
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer() { munmap(base_, bytes_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_[i]; }
  std::span<T> span() { return {data_, count_}; }

 private:
  void* base_;
  size_t bytes_;
  T* data_;
  size_t count_;
};

}  // namespace switchyard::testing
