#include "model/convert/partial_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "switchyard/core/error.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kJournalName = ".switchyard-quantize";

fs::path FolderOf(const fs::path& out) { return fs::path(out.string() + ".partial"); }

std::string ReasonOf(int error) { return std::generic_category().message(error); }

// Without a separator at its end, and with no "." and ".." in it.
fs::path Clean(const fs::path& path) {
  std::error_code failed;
  fs::path clean = fs::weakly_canonical(path, failed);
  if (failed) clean = fs::absolute(path).lexically_normal();
  return clean.has_filename() ? clean : clean.parent_path();
}

bool IsBelow(const fs::path& path, const fs::path& folder) {
  const auto [end, ignored] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

void SyncFolder(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

fs::path ParentOf(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// A model folder has nothing that a conversion would not write.
void RequireModelFolder(const fs::path& out) {
  bool has_config = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(out)) {
    has_config = has_config || entry.path().filename() == "config.json";
    if (!entry.is_directory() || entry.is_symlink()) continue;
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("{}: holds the folder {}: it is not only a model, and is not replaced",
                            out.string(), entry.path().filename().string()));
  }
  if (has_config || fs::is_empty(out)) return;
  throw Error(ErrorCode::kFailedPrecondition,
              fmt::format("{}: has no config.json: it is no model folder, and is not replaced",
                          out.string()));
}

}  // namespace

void RequireOutput(const fs::path& in, const fs::path& out, bool is_file, bool force) {
  const fs::path from = Clean(in), to = Clean(out);
  const auto refuse = [&](ErrorCode code, std::string_view why) {
    throw Error(code, fmt::format("{}: {}", out.string(), why));
  };
  if (out.empty()) refuse(ErrorCode::kInvalidArgument, "OUT is empty");
  if (from == to) refuse(ErrorCode::kInvalidArgument, "OUT is IN");
  if (IsBelow(to, from)) refuse(ErrorCode::kInvalidArgument, "OUT lies in IN");
  if (IsBelow(from, to)) refuse(ErrorCode::kInvalidArgument, "IN lies in OUT");
  const bool has_gguf_name = out.extension() == ".gguf";
  if (is_file && !has_gguf_name)
    refuse(ErrorCode::kInvalidArgument, "the name of a GGUF file ends in .gguf");
  if (!is_file && (has_gguf_name || out.extension() == ".safetensors"))
    refuse(ErrorCode::kInvalidArgument, "this scheme is written as a folder, not as a file");
  std::error_code ignored;
  if (!fs::is_directory(ParentOf(to), ignored))
    refuse(ErrorCode::kInvalidArgument, "its folder does not exist");
  const fs::file_status status = fs::status(to, ignored);
  if (!fs::exists(status)) return;
  if (!force) refuse(ErrorCode::kFailedPrecondition, "exists; --force replaces it");
  if (is_file != fs::is_regular_file(status) || is_file == fs::is_directory(status)) {
    refuse(ErrorCode::kFailedPrecondition,
           is_file ? "is no file, and is not replaced" : "is no folder, and is not replaced");
  }
  if (!is_file) RequireModelFolder(to);
}

void PartialOutput::Throw(int error, const std::string& name) const {
  const bool full = error == ENOSPC || error == EDQUOT;
  throw Error(full ? ErrorCode::kResourceExhausted : ErrorCode::kUnavailable,
              fmt::format("{}: cannot be written: {}{}", (folder_ / name).string(), ReasonOf(error),
                          full ? "; make room and run the same command again to go on" : ""));
}

PartialOutput::PartialOutput(const fs::path& out, const ConvertPlan& plan,
                             const std::string& identity, bool force)
    : out_(Clean(out)), folder_(FolderOf(out_)), plan_(plan) {
  std::error_code failed;
  fs::create_directory(folder_, failed);
  if (failed) Throw(failed.value(), "");
  try {
    OpenJournal(identity, force);
    if (!complete_.empty() && !FilesAreThere()) {
      complete_.clear();
      StartJournal(identity);
    }
    OpenFiles();
  } catch (...) {
    for (int fd : fds_) ::close(fd);
    if (journal_fd_ >= 0) ::close(journal_fd_);
    throw;
  }
}

PartialOutput::~PartialOutput() {
  for (int fd : fds_) ::close(fd);
  if (journal_fd_ >= 0) ::close(journal_fd_);
}

void PartialOutput::OpenJournal(const std::string& identity, bool force) {
  const std::string name(kJournalName);
  journal_fd_ = ::open((folder_ / name).c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (journal_fd_ < 0) Throw(errno, name);
  if (::flock(journal_fd_, LOCK_EX | LOCK_NB) != 0) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("{}: another run writes to it", folder_.string()));
  }
  ReadJournal(identity, force);
}

void PartialOutput::ReadJournal(const std::string& identity, bool force) {
  std::ifstream file(folder_ / kJournalName, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t end = text.find('\n');
  // Nothing is complete before the first line is.
  if (end == std::string::npos) return StartJournal(identity);
  if (text.substr(0, end) != identity) {
    if (force) return StartJournal(identity);
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("{}: holds an unfinished run with other arguments, another input or "
                            "another version of the program; --force starts anew",
                            folder_.string()));
  }
  size_t begin = end + 1;
  for (size_t next = 0; (next = text.find('\n', begin)) != std::string::npos; begin = next + 1) {
    const std::string_view line = std::string_view(text).substr(begin, next - begin);
    size_t unit = 0;
    const auto [rest, error] = std::from_chars(line.data(), line.data() + line.size(), unit);
    if (error != std::errc() || rest == line.data() + line.size() || *rest != ' ' ||
        unit >= plan_.units.size())
      throw Error(ErrorCode::kCorruptData, fmt::format("{}: a line of the journal is damaged; "
                                                       "--force starts anew",
                                                       folder_.string()));
    complete_[unit] = std::string(rest + 1, line.data() + line.size());
  }
  // A line without an end would run into the next one.
  if (::ftruncate(journal_fd_, static_cast<off_t>(begin)) != 0)
    Throw(errno, std::string(kJournalName));
}

void PartialOutput::StartJournal(const std::string& identity) {
  if (::ftruncate(journal_fd_, 0) != 0) Throw(errno, std::string(kJournalName));
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    std::error_code ignored;
    if (entry.path().filename() != kJournalName) fs::remove(entry.path(), ignored);
  }
  const std::string line = identity + "\n";
  if (::write(journal_fd_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    Throw(errno, std::string(kJournalName));
}

void PartialOutput::RequireSpace(size_t bytes) const {
  struct statvfs disk {};
  if (::statvfs(folder_.c_str(), &disk) != 0) return;
  const size_t available = size_t{disk.f_bavail} * size_t{disk.f_frsize};
  if (bytes <= available) return;
  throw Error(ErrorCode::kResourceExhausted,
              fmt::format("{}: the output needs {} bytes more, the disk has {}", folder_.string(),
                          bytes, available));
}

// Whoever took a file away has taken what the journal says of it.
bool PartialOutput::FilesAreThere() const {
  return std::ranges::all_of(plan_.files, [&](const OutputFile& file) {
    std::error_code failed;
    return fs::file_size(folder_ / file.name, failed) == file.bytes && !failed;
  });
}

void PartialOutput::OpenFiles() {
  size_t missing = 0;
  for (const OutputFile& file : plan_.files) {
    std::error_code failed;
    const size_t there = fs::file_size(folder_ / file.name, failed);
    missing += failed ? file.bytes : file.bytes - std::min<size_t>(there, file.bytes);
  }
  RequireSpace(missing);
  for (const OutputFile& file : plan_.files) {
    const int fd = ::open((folder_ / file.name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) Throw(errno, file.name);
    fds_.push_back(fd);
    if (::ftruncate(fd, static_cast<off_t>(file.bytes)) != 0) Throw(errno, file.name);
    // Not every file system can reserve; then the disk may fill up later.
    if (::fallocate(fd, 0, 0, static_cast<off_t>(file.bytes)) != 0 && errno != EOPNOTSUPP &&
        errno != ENOSYS && errno != EINTR)
      Throw(errno, file.name);
    WriteAt(fd, 0, std::as_bytes(std::span<const char>(file.header)), file.name);
  }
}

void PartialOutput::WriteAt(int fd, size_t offset, std::span<const std::byte> bytes,
                            const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) Throw(errno, name);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<size_t>(written);
  }
}

void PartialOutput::Write(const OutputTensor& tensor, const EncodedPiece& piece) {
  const std::span<const std::byte> bytes(piece.bytes);
  const std::string& name = plan_.files[tensor.file].name;
  size_t offset = tensor.offset + piece.offset;
  if (piece.run_bytes == piece.stride) return WriteAt(fds_[tensor.file], offset, bytes, name);
  for (size_t at = 0; at < bytes.size(); at += piece.run_bytes, offset += piece.stride)
    WriteAt(fds_[tensor.file], offset, bytes.subspan(at, piece.run_bytes), name);
}

void PartialOutput::Sync() {
  if (pending_.empty()) return;
  for (size_t i = 0; i < fds_.size(); ++i) {
    if (::fdatasync(fds_[i]) != 0) Throw(errno, plan_.files[i].name);
  }
  std::string lines;
  for (const auto& [unit, text] : pending_) lines += fmt::format("{} {}\n", unit, text);
  for (size_t done = 0; done < lines.size();) {
    const ssize_t written = ::write(journal_fd_, lines.data() + done, lines.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) Throw(errno, std::string(kJournalName));
    done += static_cast<size_t>(written);
  }
  if (::fdatasync(journal_fd_) != 0) Throw(errno, std::string(kJournalName));
  pending_.clear();
}

void PartialOutput::AddText(const TextFile& text) {
  AddCopy(text.name, std::as_bytes(std::span<const char>(text.content)));
}

void PartialOutput::AddCopy(const std::string& name, std::span<const std::byte> bytes) {
  const int fd = ::open((folder_ / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) Throw(errno, name);
  try {
    WriteAt(fd, 0, bytes, name);
  } catch (...) {
    ::close(fd);
    throw;
  }
  const bool is_synced = ::fsync(fd) == 0;
  const int error = errno;
  if (::close(fd) != 0) Throw(errno, name);
  if (!is_synced) Throw(error, name);
}

void PartialOutput::Discard() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

void PartialOutput::Commit(bool is_single_file) {
  Sync();
  for (size_t i = 0; i < fds_.size(); ++i) {
    if (::fsync(fds_[i]) != 0) Throw(errno, plan_.files[i].name);
  }
  SyncFolder(folder_);
  std::error_code failed;
  if (is_single_file) {
    fs::rename(folder_ / plan_.files.front().name, out_, failed);
    if (failed) Throw(failed.value(), plan_.files.front().name);
    fs::remove(folder_ / kJournalName, failed);
    fs::remove(folder_, failed);
  } else {
    fs::remove(folder_ / kJournalName, failed);
    // A folder cannot be renamed over one that is not empty: the old one steps aside first.
    const fs::path old(out_.string() + ".replaced");
    const bool replaces = fs::exists(out_);
    if (replaces) fs::rename(out_, old, failed);
    if (!failed) fs::rename(folder_, out_, failed);
    if (failed) Throw(failed.value(), "");
    if (replaces) fs::remove_all(old, failed);
  }
  SyncFolder(ParentOf(out_));
}

}  // namespace switchyard
