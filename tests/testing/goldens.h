// Where the tests find recorded cases. Two places: tests/golden in the repository (always there),
// and the large set beside the repository (../shared/goldens) or in $SWITCHYARD_GOLDENS, which may
// be absent.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>

namespace switchyard::testing {

// The large set; nullopt when it is absent.
std::optional<std::filesystem::path> GoldenDir();

// tests/golden of this repository.
std::filesystem::path LocalGoldenDir();

// The root of the repository.
std::filesystem::path SourceDir();

}  // namespace switchyard::testing

// Skips the test with a message (which ctest counts as skipped) when the large golden set is
// absent.
#define SY_SKIP_WITHOUT_GOLDENS()                                                                 \
  if (!::switchyard::testing::GoldenDir())                                                        \
  GTEST_SKIP() << "the golden set was not found (../shared/goldens or $SWITCHYARD_GOLDENS); the " \
                  "small set in "                                                                 \
                  "tests/golden ran instead"
