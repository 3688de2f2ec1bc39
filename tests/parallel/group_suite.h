// The tests of a ProcessGroup that hold for every carrier and every number of ranks.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <span>
#include <string>
#include <string_view>

#include "switchyard/parallel/process_group.h"

namespace switchyard::testing {

// One test: `run` is called on every rank of a group that it has for itself.
struct GroupCase {
  std::string_view name;
  void (*run)(ProcessGroup& group);
};
inline std::ostream& operator<<(std::ostream& out, const GroupCase& group_case) {
  return out << group_case.name;
}

std::span<const GroupCase> GroupCases();

inline std::string GroupCaseName(const ::testing::TestParamInfo<GroupCase>& info) {
  return std::string(info.param.name);
}

}  // namespace switchyard::testing
