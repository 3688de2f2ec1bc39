// The output of a conversion while it is not complete: a folder OUT.partial with the files and a
// journal of what is in them.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/convert/plan.h"

namespace switchyard {

// Journal: a line that names the conversion, then a line for every unit whose bytes have reached
// the disk. What a line says of a unit is the caller's text. A last line that is cut short is as if
// it were not there.
class PartialOutput {
 public:
  // Makes the folder, or continues it. Takes a lock that ends with the process.
  // `identity` stands for the arguments, the input and the layout; a run with another one cannot
  // be continued.
  // Errors: kFailedPrecondition if there is another conversion in the folder and no `force`;
  //   kUnavailable if another run writes to it, or if it cannot be written; kResourceExhausted with
  //   the bytes that the disk lacks.
  PartialOutput(const std::filesystem::path& out, const ConvertPlan& plan,
                const std::string& identity, bool force);
  ~PartialOutput();
  PartialOutput(const PartialOutput&) = delete;
  PartialOutput& operator=(const PartialOutput&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  // Units that are complete, with their text.
  const std::map<size_t, std::string>& complete() const { return complete_; }

  // Any thread. Errors: kResourceExhausted if the disk is full; kUnavailable.
  void Write(const OutputTensor& tensor, const EncodedPiece& piece);
  // A unit whose bytes are written; it counts as complete after the next Sync.
  void Done(size_t unit, std::string text) { pending_.emplace_back(unit, std::move(text)); }
  // Bytes to the disk, then the lines of what is done.
  void Sync();

  // A file written or copied as a whole.
  void AddText(const TextFile& text);
  void AddCopy(const std::string& name, std::span<const std::byte> bytes);

  // Removes the folder: the conversion cannot be.
  void Discard();

  // The complete output takes its name; what was there goes.
  void Commit(bool is_single_file);

 private:
  void OpenJournal(const std::string& identity, bool force);
  void ReadJournal(const std::string& identity, bool force);
  void StartJournal(const std::string& identity);
  bool FilesAreThere() const;
  void OpenFiles();
  void RequireSpace(size_t bytes) const;
  void WriteAt(int fd, size_t offset, std::span<const std::byte> bytes, const std::string& name);
  [[noreturn]] void Throw(int error, const std::string& name) const;

  std::filesystem::path out_, folder_;
  const ConvertPlan& plan_;
  int journal_fd_ = -1;
  std::vector<int> fds_;
  std::map<size_t, std::string> complete_;
  std::vector<std::pair<size_t, std::string>> pending_;
};

// Refuses before anything is read.
// Errors: kInvalidArgument if `out` is `in`, or lies in it, or the other way round;
//   kFailedPrecondition if `out` exists and may not be replaced.
void RequireOutput(const std::filesystem::path& in, const std::filesystem::path& out, bool is_file,
                   bool force);

}  // namespace switchyard
