// Model folders for tests: raw safetensors bytes, temporary folders, and a check of errors.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "testing/errors.h"

namespace switchyard::testing {

// Texts one after the other. ("a" + std::string() makes GCC 12 warn of an overlap that is not
// there.)
inline std::string Cat(std::initializer_list<std::string_view> texts) {
  std::string all;
  for (std::string_view text : texts) all += text;
  return all;
}

// The bytes of a file, faulty or not: the length of `header`, `header`, `data`.
inline std::string SafetensorsBytes(std::string_view header, std::string_view data) {
  std::string bytes;
  for (size_t i = 0; i < 8; ++i) {
    bytes += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i) & 0xff);
  }
  bytes += header;
  bytes += data;
  return bytes;
}

// Builds a correct file, one tensor after the other.
class SafetensorsBuilder {
 public:
  // `shape` as it stands in the header: "[2,3]".
  SafetensorsBuilder& Add(std::string_view name, std::string_view dtype, std::string_view shape,
                          std::string_view data) {
    if (!header_.empty()) header_ += ',';
    header_ +=
        Cat({"\"", name, R"(":{"dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":[)",
             std::to_string(data_.size()), ",", std::to_string(data_.size() + data.size()), "]}"});
    data_ += data;
    return *this;
  }

  // With the header padded by spaces to `header_alignment` bytes. 8 is what writers do.
  std::string Bytes(size_t header_alignment = 8) const {
    std::string header = '{' + header_ + '}';
    while (header.size() % header_alignment != 0) header += ' ';
    return SafetensorsBytes(header, data_);
  }

 private:
  std::string header_;
  std::string data_;
};

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text));
}

// A copy of exactly the given bytes on the heap, so that the address sanitizer sees every read past
// them. Starts `misalignment` bytes after an address that is aligned to 16.
class ExactBytes {
 public:
  explicit ExactBytes(std::string_view bytes, size_t misalignment = 0)
      : data_(new char[misalignment + bytes.size()]), span_() {
    std::copy(bytes.begin(), bytes.end(), data_.get() + misalignment);
    span_ = AsBytes({data_.get() + misalignment, bytes.size()});
  }
  std::span<const std::byte> span() const { return span_; }

 private:
  std::unique_ptr<char[]> data_;
  std::span<const std::byte> span_;
};

// A folder that is removed with everything in it at the end of the test.
class TempFolder {
 public:
  TempFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "switchyard_test_XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr)
      throw std::system_error(errno, std::generic_category(), path);
    path_ = path;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  void Write(std::string_view name, std::string_view contents) const {
    std::ofstream file(path_ / name, std::ios::binary);
    file << contents;
    file.close();
    ASSERT_TRUE(file) << name;
  }
  std::string Read(std::string_view name) const {
    std::ifstream file(path_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Names of everything in the folder, sorted.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path path_;
};

// Takes the rights of root away while it lives: root may read and write everything.
class OrdinaryUser {
 public:
  OrdinaryUser() : was_root_(::geteuid() == 0) {
    constexpr uid_t kNobody = 65534;
    is_ordinary_ = !was_root_ || ::seteuid(kNobody) == 0;
  }
  ~OrdinaryUser() {
    if (was_root_ && ::seteuid(0) != 0) std::abort();
  }
  OrdinaryUser(const OrdinaryUser&) = delete;
  OrdinaryUser& operator=(const OrdinaryUser&) = delete;

  // False where the system does not allow it.
  bool is_ordinary() const { return is_ordinary_; }

 private:
  bool was_root_;
  bool is_ordinary_;
};

}  // namespace switchyard::testing
