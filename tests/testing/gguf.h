// GGUF models by their paths.
#pragma once

#include <filesystem>

#include "switchyard/model/gguf.h"

namespace switchyard::testing {

// The model that a file is (a part of), or the only one in a folder.
inline GgufModel OpenGguf(const std::filesystem::path& path) {
  return GgufModel::Open(std::filesystem::is_directory(path) ? ModelFiles::OpenFolder(path)
                                                             : OpenGgufFiles(path));
}

}  // namespace switchyard::testing
