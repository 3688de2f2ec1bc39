#include "switchyard/model/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "model/config_reader.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

std::string Reason(int error) { return std::generic_category().message(error); }

// Closes a file descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int Get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void ThrowUnreadable(const std::string& path, int error) {
  throw Error(ErrorCode::kUnavailable, fmt::format("{}: cannot be read: {}", path, Reason(error)));
}

// Maps a whole file. The pages stay valid after the descriptor is closed.
std::span<const std::byte> MapFile(const std::string& path) {
  // O_NONBLOCK: opening a pipe that somebody put into the folder must not wait for a writer. It
  // does nothing to files.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.Get() < 0) {
    const int error = errno;
    struct stat link {};
    if (error == ENOENT && ::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode)) {
      throw Error(
          ErrorCode::kNotFound,
          fmt::format(
              "{}: is a link to a file that does not exist; an interrupted download leaves such "
              "links, so download the model again",
              path));
    }
    if (error == ENOENT) {
      throw Error(ErrorCode::kNotFound,
                  fmt::format("{}: the file has been removed since its folder was opened", path));
    }
    ThrowUnreadable(path, error);
  }
  struct stat info {};
  if (::fstat(file.Get(), &info) != 0) ThrowUnreadable(path, errno);
  if (S_ISDIR(info.st_mode)) {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: is a folder, expected a file", path));
  }
  if (!S_ISREG(info.st_mode)) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("{}: cannot be read: it is a device, pipe or socket, expected a regular file",
                    path));
  }
  // The system refuses to map zero bytes.
  if (info.st_size == 0) return {};
  const auto bytes = static_cast<size_t>(info.st_size);
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.Get(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    throw Error(ErrorCode::kUnavailable,
                fmt::format("{}: cannot be mapped ({} bytes): {}", path, bytes, Reason(error)));
  }
  return {static_cast<const std::byte*>(data), bytes};
}

}  // namespace

struct ModelFiles::Impl {
  struct File {
    std::string path;  // empty for a file in memory
    bool is_folder = false;
    bool is_mapped = false;
    std::span<const std::byte> bytes;
  };

  std::string description;
  bool is_in_memory = false;
  std::mutex mutex;  // guards is_mapped and bytes of every file; the names never change
  std::map<std::string, File, std::less<>> files;

  ~Impl() {
    if (is_in_memory) return;
    for (const auto& [name, file] : files) {
      // munmap takes no pointer to const, though it writes nothing.
      if (!file.bytes.empty())
        ::munmap(const_cast<std::byte*>(file.bytes.data()), file.bytes.size());
    }
  }
};

ModelFiles::ModelFiles(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ModelFiles::~ModelFiles() = default;

bool ModelFiles::IsPlainName(std::string_view name) {
  constexpr std::string_view kForbidden("/\\\0", 3);
  return !name.empty() && name != "." && name.find_first_of(kForbidden) == std::string_view::npos &&
         name.find("..") == std::string_view::npos;
}

std::shared_ptr<const ModelFiles> ModelFiles::OpenFolder(const fs::path& folder) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) {
    const bool is_absent = status.type() == fs::file_type::not_found;
    throw Error(is_absent ? ErrorCode::kNotFound : ErrorCode::kUnavailable,
                fmt::format("{}: {}; expected the folder of a model", folder.string(),
                            is_absent ? "there is no such folder" : error.message()));
  }
  if (!fs::is_directory(status)) {
    throw Error(
        ErrorCode::kNotFound,
        fmt::format("{}: is a file, expected a folder; give the folder that holds config.json and "
                    "the weights",
                    folder.string()));
  }

  auto impl = std::make_unique<Impl>();
  impl->description = folder.string();
  size_t num_files = 0;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!IsPlainName(name)) continue;
    std::error_code ignored;  // of a link that leads nowhere; Map explains it
    const bool is_folder = entry->is_directory(ignored);
    impl->files.emplace(name, Impl::File{entry->path().string(), is_folder, false, {}});
    if (!is_folder) ++num_files;
  }
  if (error) {
    throw Error(ErrorCode::kUnavailable, fmt::format("{}: the folder cannot be listed: {}",
                                                     folder.string(), error.message()));
  }

  // models--org--name of the hub cache: "blobs", "refs" and "snapshots", and the model one level
  // further down.
  const auto snapshots = impl->files.find("snapshots");
  if (num_files == 0 && snapshots != impl->files.end() && snapshots->second.is_folder) {
    std::string example = "<revision>";
    fs::directory_iterator snapshot(snapshots->second.path, error);
    if (!error && snapshot != fs::directory_iterator())
      example = snapshot->path().filename().string();
    throw Error(ErrorCode::kNotFound,
                fmt::format("{}: is the root of a hub cache and holds no model itself; open {}/{}",
                            folder.string(), snapshots->second.path, example));
  }
  return std::make_shared<ModelFiles>(std::move(impl));
}

std::shared_ptr<const ModelFiles> ModelFiles::OpenSome(const fs::path& folder,
                                                       std::span<const std::string> names,
                                                       std::string description) {
  auto impl = std::make_unique<Impl>();
  impl->description = std::move(description);
  for (const std::string& name : names) {
    const fs::path path = folder / fs::path(name);
    std::error_code ignored;
    if (IsPlainName(name) && fs::exists(fs::symlink_status(path, ignored)))
      impl->files.emplace(name, Impl::File{path.string(), false, false, {}});
  }
  return std::make_shared<ModelFiles>(std::move(impl));
}

std::shared_ptr<const ModelFiles> ModelFiles::FromMemory(std::string description,
                                                         const std::vector<Embedded>& files) {
  auto impl = std::make_unique<Impl>();
  impl->description = std::move(description);
  impl->is_in_memory = true;
  for (const Embedded& file : files) {
    if (!IsPlainName(file.name)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is not a plain file name", impl->description,
                              QuoteForMessage(file.name)));
    }
    const bool is_new =
        impl->files.emplace(std::string(file.name), Impl::File{{}, false, true, file.bytes}).second;
    if (!is_new) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: two files are named {}", impl->description, QuoteForMessage(file.name)));
    }
  }
  return std::make_shared<ModelFiles>(std::move(impl));
}

bool ModelFiles::Has(std::string_view name) const {
  const auto found = impl_->files.find(name);
  return found != impl_->files.end() && !found->second.is_folder;
}

std::vector<std::string> ModelFiles::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : impl_->files) {
    if (!file.is_folder) names.push_back(name);
  }
  return names;
}

std::span<const std::byte> ModelFiles::Map(std::string_view name) const {
  if (!IsPlainName(name)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} is not a plain file name; files are read from this folder only",
                            impl_->description, QuoteForMessage(name)));
  }
  const auto found = impl_->files.find(name);
  if (found == impl_->files.end()) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("{}: there is no file {}", impl_->description, QuoteForMessage(name)));
  }
  Impl::File& file = found->second;
  if (file.is_folder) {
    throw Error(ErrorCode::kNotFound, fmt::format("{}: is a folder, expected a file", file.path));
  }
  const std::lock_guard lock(impl_->mutex);
  if (!file.is_mapped) {
    file.bytes = MapFile(file.path);
    file.is_mapped = true;
  }
  return file.bytes;
}

void ModelFiles::Release(std::span<const std::byte> bytes) const {
  if (impl_->is_in_memory || bytes.empty()) return;
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  {
    // Aligned copies of tensors lie elsewhere, and dropping their pages would lose them.
    const std::lock_guard lock(impl_->mutex);
    const bool is_mapped = std::ranges::any_of(impl_->files, [&](const auto& entry) {
      const auto first = reinterpret_cast<uintptr_t>(entry.second.bytes.data());
      return begin >= first && begin + bytes.size() <= first + entry.second.bytes.size();
    });
    if (!is_mapped) return;
  }
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes.size()) / page * page;
  // Only whole pages: those at the ends belong to neighbours too.
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

std::string ModelFiles::ReadText(std::string_view name) const {
  const std::span<const std::byte> bytes = Map(name);
  if (bytes.empty()) return {};
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string ModelFiles::PathOf(std::string_view name) const {
  if (impl_->is_in_memory) return fmt::format("{} ({})", name, impl_->description);
  if (const auto found = impl_->files.find(name); found != impl_->files.end())
    return found->second.path;
  return (fs::path(impl_->description) / fs::path(name)).string();
}

const std::string& ModelFiles::description() const { return impl_->description; }

}  // namespace switchyard
