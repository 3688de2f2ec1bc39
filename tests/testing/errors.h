// Assertions on errors.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "switchyard/core/error.h"

namespace switchyard::testing {

// Runs body and expects an Error of `code` whose message contains every one of `words`. Returns the
// message.
template <typename Body>
std::string ExpectError(ErrorCode code, std::initializer_list<std::string_view> words,
                        const Body& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.message();
    for (std::string_view word : words) {
      EXPECT_NE(e.message().find(word), std::string::npos)
          << "\"" << word << "\" is missing in: " << e.message();
    }
    return e.message();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

}  // namespace switchyard::testing
