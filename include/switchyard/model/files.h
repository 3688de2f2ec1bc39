// The files that a model is loaded from: a folder on disk, or files compiled into the program.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// A read-only set of named files: a folder in Hugging Face hub layout, or files in memory.
//
// The set of names is fixed when it is opened. Names are plain file names. They are often read from
// other files (an index names its shards), so they are untrusted: they are only looked up in the
// set, never joined to a path. All functions may be called concurrently. A file must not be
// shortened while it is mapped: reading a page that is gone ends the process with SIGBUS, as with
// every memory-mapped file.
class ModelFiles {
  struct Impl;

 public:
  // A file in memory; the bytes must live as long as the set.
  struct Embedded {
    std::string_view name;
    std::span<const std::byte> bytes;
  };

  // Lists `folder`; opens none of its files. Links to files (the layout of the hub cache) count as
  // files.
  // Errors: kNotFound if the folder does not exist, is a file, or is the root of a hub cache, where
  //   only the folders below snapshots/ hold models; kUnavailable if it cannot be listed.
  static std::shared_ptr<const ModelFiles> OpenFolder(const std::filesystem::path& folder);

  // Some files of a folder, which need not be a model by themselves; `description` stands in
  // messages. Errors: as OpenFolder.
  static std::shared_ptr<const ModelFiles> OpenSome(const std::filesystem::path& folder,
                                                    std::span<const std::string> names,
                                                    std::string description);

  // Files that are in memory already. `description` stands in messages where a folder has its path.
  // Does not copy: the bytes must outlive the result.
  // Errors: kInvalidArgument if a name is no plain file name or appears twice.
  static std::shared_ptr<const ModelFiles> FromMemory(std::string description,
                                                      const std::vector<Embedded>& files);

  // True for a name that can stand in the set: not empty, without '/', '\' and NUL, and without
  // "..".
  static bool IsPlainName(std::string_view name);

  // Whether there is such a file. A link that leads nowhere counts, so that Map can say what is
  // wrong; a folder does not.
  bool Has(std::string_view name) const;

  // All names, sorted, without folders.
  std::vector<std::string> Names() const;

  // The bytes of a file, mapped read-only on first use. They live as long as *this. Empty files
  // give an empty span.
  // Errors: kInvalidArgument if the name is not plain; kNotFound if there is no such file, if it is
  //   a folder, or if it is a link that leads nowhere; kUnavailable with the reason of the system
  //   if it cannot be read.
  std::span<const std::byte> Map(std::string_view name) const;

  // Gives the memory of mapped bytes back to the system; whoever reads them again waits for the
  // file. Nothing happens to bytes that are not of a mapped file.
  void Release(std::span<const std::byte> bytes) const;

  // A copy of a file.
  // Errors: as Map.
  std::string ReadText(std::string_view name) const;

  // Where a file is, for messages only: "folder/name", or "name (description)" for files in memory.
  // `name` need not exist.
  std::string PathOf(std::string_view name) const;

  // The path of the folder as it was given, or the description given to FromMemory.
  const std::string& description() const;

  // For OpenFolder and FromMemory; Impl is private, so nobody else can call it.
  explicit ModelFiles(std::unique_ptr<Impl> impl);
  ~ModelFiles();
  ModelFiles(const ModelFiles&) = delete;
  ModelFiles& operator=(const ModelFiles&) = delete;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard
