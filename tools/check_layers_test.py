#!/usr/bin/env python3
"""Tests of check_layers.py: every rule is broken once in a small tree and must be reported; the clean tree passes."""
import os
import tempfile
import unittest

import check_layers

CLEAN = {
    "include/switchyard/core/error.h": "#pragma once\n#include <string>\n",
    "include/switchyard/moe/contract/config.h": '#pragma once\n#include "switchyard/core/error.h"\n',
    "src/core/error.cc": '#include "switchyard/core/error.h"\n#include <fmt/format.h>\n',
    "src/kernels/dot/dot.h": '#pragma once\n#include "switchyard/core/error.h"\n',
    "src/kernels/dot/dot.cc": '#include "kernels/dot/dot.h"\n// #include "engine/engine.h"\n',
    "src/moe/runners/aiter/core.h":
        '#pragma once\n#include "switchyard/moe/contract/config.h"\n#include "kernels/dot/dot.h"\n',
    "src/moe/layer/layer.cc": '#include "moe/runners/aiter/core.h"\n',
    "src/engine/engine.h": "#pragma once\n",
    "src/engine/engine.cc": '#include "engine/engine.h"\n#include "moe/runners/aiter/core.h"\n',
    "src/parallel_mpi/group.cc": "#include <mpi.h>\n",
    "tests/engine/engine_test.cc": '#include "engine/engine.h"\n#include "kernels/dot/dot.h"\n',
    "tests/testing/random.h": "#pragma once\n",
    "apps/cli/main.cc": '#include "engine/engine.h"\n',
}


def check(changes):
    """Messages for the clean tree with some files added or replaced."""
    with tempfile.TemporaryDirectory() as root:
        for path, text in {**CLEAN, **changes}.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        return check_layers.check(root)[0]


class LayersTest(unittest.TestCase):
    def expect_one(self, changes, *parts):
        messages = check(changes)
        self.assertEqual(len(messages), 1, messages)
        for part in parts:
            self.assertIn(part, messages[0])

    def test_clean_tree_passes(self):
        self.assertEqual(check({}), [])

    def test_lower_layer_includes_higher(self):
        self.expect_one({"src/core/bad.cc": '#include <string>\n\n#include "engine/engine.h"\n'}, "src/core/bad.cc:3:",
                        "layer core may not include layer engine", "no other layer")

    def test_public_include_spelling_is_seen(self):
        self.expect_one({"src/core/bad.cc": '#include "switchyard/moe/contract/config.h"\n'}, "core", "moe/contract")

    def test_angle_brackets_and_spaces_are_seen(self):
        self.expect_one({"src/core/bad.cc": "  #  include <switchyard/moe/contract/config.h>\n"}, "core",
                        "moe/contract")

    def test_siblings_do_not_know_each_other(self):
        self.expect_one({"src/moe/dispatchers/bad.cc": '#include "moe/runners/aiter/core.h"\n'}, "moe/dispatchers",
                        "moe/runners", "moe/ep, moe/ascend")

    def test_include_relative_to_the_file(self):
        self.expect_one({"src/moe/dispatchers/bad.cc": '#include "../runners/aiter/core.h"\n'}, "moe/runners")

    def test_header_made_at_build_time(self):
        self.expect_one({"src/core/bad.cc": '#include "engine/made.h"\n'}, "layer engine")

    def test_text_stays_apart_from_the_engine(self):
        self.expect_one({"src/text/bad.cc": '#include "engine/engine.h"\n'}, "layer text may not include layer engine")
        self.expect_one({"src/text/text.h": "", "src/engine/bad.cc": '#include "text/text.h"\n'}, "engine", "text")

    def test_mpi(self):
        self.expect_one({"src/engine/bad.cc": "#include <mpi.h>\n"}, "only the layer parallel_mpi")
        self.expect_one({"apps/cli/bad.cc": "#include <mpi.h>\n"}, "only the layer parallel_mpi")

    def test_layer_code_includes_tests_or_programs(self):
        self.expect_one({"src/core/bad.cc": '#include "testing/random.h"\n'}, "tests/testing/random.h", "in no layer")

    def test_public_header_exposes_a_library(self):
        self.expect_one({"include/switchyard/core/bad.h": "#include <fmt/format.h>\n"}, "public header")

    def test_public_header_exposes_a_private_one(self):
        self.expect_one({"include/switchyard/kernels/bad.h": '#include "kernels/dot/dot.h"\n'}, "not installed")

    def test_cycle(self):
        self.expect_one({"src/core/a.h": '#include "core/b.h"\n', "src/core/b.h": '#include "core/a.h"\n'},
                        "include cycle: src/core/a.h -> src/core/b.h -> src/core/a.h")

    def test_folder_without_a_purpose(self):
        self.expect_one({"src/core/utils/strings.h": ""}, "src/core/utils")

    def test_file_outside_every_layer(self):
        self.expect_one({"src/helper.cc": ""}, "src/helper.cc", "in no layer")
        self.expect_one({"src/moe/helper.cc": ""}, "src/moe/helper.cc", "in no layer")

    def test_table_has_no_cycle(self):
        self.assertIsNone(check_layers.find_cycle(check_layers.LAYERS))

    def test_table_names_known_layers(self):
        for layer, uses in check_layers.LAYERS.items():
            for used in uses:
                self.assertIn(used, check_layers.LAYERS, layer)

    def test_allowed_layers_are_transitive(self):
        self.assertEqual(check_layers.allowed_layers("quant"), {"quant", "kernels", "core"})
        self.assertNotIn("parallel_mpi", check_layers.allowed_layers("engine"))


if __name__ == "__main__":
    unittest.main()
