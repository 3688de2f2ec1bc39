#include "testing/goldens.h"

#include <cstdlib>

namespace switchyard::testing {

std::filesystem::path SourceDir() { return SY_SOURCE_DIR; }
std::filesystem::path LocalGoldenDir() { return SourceDir() / "tests" / "golden"; }

std::optional<std::filesystem::path> GoldenDir() {
  const char* from_env = std::getenv("SWITCHYARD_GOLDENS");
  const std::filesystem::path dir = from_env != nullptr ? std::filesystem::path(from_env)
                                                        : SourceDir() / ".." / "shared" / "goldens";
  if (!std::filesystem::is_directory(dir)) return std::nullopt;
  return dir;
}

}  // namespace switchyard::testing
