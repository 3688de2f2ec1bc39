// Runs a test body on every instruction set that this machine and build have.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <hwy/targets.h>
#include <string>

#include "kernels/target.h"

namespace switchyard::testing {

// Calls body() once per Highway target, best first, with dispatch forced to it. Fails if dispatch
// chose another one, and names the targets of this build that the CPU lacks.
template <typename Body>
void ForEachTarget(const Body& body) {
  hwy::SetSupportedTargetsForTest(0);
  for (int64_t left = HWY_TARGETS; left != 0; left &= left - 1) {
    const int64_t target = left & -left;
    if ((hwy::SupportedTargets() & target) == 0) {
      std::printf("[  SKIPPED ] %s: this CPU lacks it\n", hwy::TargetName(target));
      continue;
    }
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    EXPECT_EQ(kernels::DispatchedTarget(), target)
        << "dispatch did not choose " << hwy::TargetName(target);
    SCOPED_TRACE(std::string("target ") + hwy::TargetName(target));
    body();
    hwy::SetSupportedTargetsForTest(0);
  }
  hwy::GetChosenTarget().DeInit();
}

}  // namespace switchyard::testing
