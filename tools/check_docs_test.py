#!/usr/bin/env python3
"""Tests of check_docs.py on small headers."""
import os
import tempfile
import unittest

import check_docs

HEADER = """// What this is for.
#pragma once

#include <string>

namespace switchyard {

// The levels.
enum class Level { kLow, kHigh };

// Counts {braces "in" text}.
class Counter {
 public:
  Counter() = default;
  explicit Counter(size_t start);
  ~Counter();

  // Adds one. Errors: kInternal when it is full.
  void Add();

  size_t num_added() const;
  size_t Twice() const { return 2 * count_; }
  bool operator==(const Counter& other) const;

 private:
  void Grow();
  size_t count_{0};
};

// Both conversions.
float ToFloat(int value);
float ToFloat(short value);

// Shapes: x [T, H].
void Scale(ConstRows x, float factor);

inline constexpr const char* kBrace = "{";

}  // namespace switchyard
"""

SOURCE = """#include "switchyard/core/counter.h"

namespace switchyard {
namespace {

[[noreturn]] void Fail(const char* what) { throw Error(ErrorCode::kInternal, what); }

}  // namespace

void Counter::Add() {
  if (count_ == 3) Fail("full");
}

float ToFloat(int value) {
  return static_cast<float>(value);
}

}  // namespace switchyard
"""


def check(header=HEADER, source=SOURCE):
    with tempfile.TemporaryDirectory() as root:
        for path, text in (("include/switchyard/core/counter.h", header), ("src/core/counter.cc", source)):
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        return check_docs.check(root)[0]


class DocsTest(unittest.TestCase):
    def expect_one(self, old, new, *parts):
        self.assertIn(old, HEADER)
        messages = check(HEADER.replace(old, new))
        self.assertEqual(len(messages), 1, messages)
        for part in parts:
            self.assertIn(part, messages[0])

    def test_good_header_passes(self):
        self.assertEqual(check(), [])

    def test_header_without_purpose(self):
        self.expect_one("// What this is for.\n", "", "counter.h:1:")

    def test_pragma_once(self):
        self.expect_one("#pragma once\n", "", "#pragma once")

    def test_type_without_comment(self):
        self.expect_one("// The levels.\n", "", "Level", "public type needs a comment")
        self.expect_one('// Counts {braces "in" text}.\n', "", "counter.h:11:", "Counter", "public type")

    def test_function_without_comment(self):
        messages = check(HEADER.replace("// Both conversions.\n", ""))
        self.assertEqual(len(messages), 2, messages)

    def test_group_ends_at_a_gap(self):
        self.expect_one("float ToFloat(short value);", "\nfloat ToFloat(short value);", "ToFloat")

    def test_class_comment_may_name_the_function(self):
        self.assertEqual(check(HEADER.replace("  // Adds one. Errors: kInternal when it is full.\n", "").replace(
            "// Counts", "// Add counts. Errors of Add: kInternal.")), [])

    def test_shapes(self):
        self.expect_one("Shapes: x [T, H].", "Multiplies.", "Scale", "Shapes:")

    def test_errors_of_a_function_that_throws_through_a_helper(self):
        self.expect_one(" Errors: kInternal when it is full.", "", "Counter::Add", "Errors:")

    def test_private_functions_need_nothing(self):
        names = [declaration.name for declaration in check_docs.public_declarations(HEADER)]
        self.assertNotIn("Grow", names)
        self.assertIn("num_added", names)


if __name__ == "__main__":
    unittest.main()
