#!/usr/bin/env python3
"""Tests of bench/compare and bench/roofline with engines that only print: nothing is timed."""
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

from compare_lib import report
from compare_lib.engines import EngineError, batched_rates, json_line, split_spec, unused_features
from compare_lib.process import run

HERE = os.path.dirname(os.path.abspath(__file__))

# Every second round is twice as slow for all of them, as on a machine whose neighbours wake up.
SLOWER = """
import json, os, sys
calls = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.path.basename(__file__) + ".calls")
with open(calls, "a") as file: file.write(json.dumps(sys.argv[1:]) + "\\n")
def option(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
def pace(first):
    return 1 if sum(first in line for line in open(calls)) % 2 else 0.5
"""
SWITCHYARD = SLOWER + """
if "--version" in sys.argv: print("switchyard 9.9")
if sys.argv[1] == "bench":
    rows = int(option("-b", "1"))
    rate = pace(f'"-b", "{rows}"')
    print(json.dumps({"pp_tps": 300 * rate, "tg_tps": 40 * rows * rate, "pp_share_of_limit": 0.5 * rate,
                      "tg_share_of_limit": 0.8 * rate, "peak_type": "int8", "read_gbps": 50 if "f16" in sys.argv else 25,
                      "f32_gops": 200, "bf16_gops": 400, "int8_gops": 800}))
"""
PYTHON = SLOWER + """
system = "AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AVX512_BF16 = 1"
if "--probe" in sys.argv: print(json.dumps({"version": "1.2", "can_repack": True, "system": system}))
elif "--first-token" in sys.argv: print("{}")
else:
    is_plain = "--no-repack" in sys.argv
    rate = pace('"--no-repack", "--prompt"') if is_plain else pace('"2", "--prompt"')
    print("noise")
    print(json.dumps({"pp_tps": (200 if is_plain else 100) * rate, "tg_tps": (10 if is_plain else 20) * rate,
                      "batch_tps": {option("--batch"): 30 * rate}}))
"""
LLAMA_BENCH = SLOWER + """
if option("-p") == "1": rows = [(1, 0, [9.0])]
else: rows = [(512, 0, [150.0, 170.0, 160.0]), (0, 64, [30.0])]
print(json.dumps([{"n_prompt": p, "n_gen": n, "samples_ts": s, "build_commit": "abc"} for p, n, s in rows]))
"""
BATCHED = """
import sys
sys.stdout = sys.stderr
print("|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |")
print("|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|")
print("|     1 |     16 |    4 |     68 |    0.100 |    10.00 |    1.000 |    64.00 |    1.100 |    61.82 |")
"""


def bench_line(scheme, rows):
    return {"scheme": scheme, "batch": rows, "prompt": 512, "step_gop": 2.0 * rows, "step_gb": 0.5 * rows**0.5,
            "tg_tps": 30.0 * rows**0.7, "tg_share_of_limit": 0.5, "pass_gop": 900.0, "pass_gb": 3.0,
            "pp_share_of_limit": 0.6, "peak_gops": 800, "read_gbps": 40 + rows, "f32_gops": 200, "bf16_gops": 400,
            "int8_gops": 800}


def lines_of(*schemes):
    return "".join(json.dumps(bench_line(scheme, rows)) + "\n" for scheme in schemes for rows in (1, 4, 16))


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.model = self.write("model.gguf", "GGUF")

    def write(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
        return path

    def program(self, name, source):
        path = self.write(name, f"#!{sys.executable}\n{source}")
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def tool(self, name, *arguments):
        return subprocess.run([sys.executable, os.path.join(HERE, name), *arguments], capture_output=True, text=True)

    def compare(self, *arguments, switchyard=SWITCHYARD):
        self.json = os.path.join(self.folder, "runs.json")
        done = self.tool("compare", self.model, "--switchyard", self.program("switchyard", switchyard), "--json", self.json,
                         "--threads", "2", "--batch", "1,4", "--rounds", "2", *arguments)
        with open(self.json, encoding="utf-8") as file:
            self.runs = json.load(file)["runs"]
        return done


class CompareTest(Case):
    def test_ratios_cancel_what_whole_rounds_have_in_common(self):
        done = self.compare("--llama-python", self.program("python", PYTHON), "--markdown")
        self.assertEqual(done.returncode, 0, done.stderr)
        # Medians over a fast and a slow round; the base of prefill is the mode without repack, of decode the other.
        self.assertIn("| prefill 512 | switchyard | 225 | 150..300 | 1.50 | 38 % |", done.stdout)
        self.assertIn("|  | llama.cpp | 75.0 | 50.0..100 | 0.50 | 12 % |", done.stdout)
        self.assertIn("| llama.cpp | 15.0 | 10.0..20.0 | 1.00 | 60 % |", done.stdout)
        self.assertIn("| decode | switchyard | 30.0 | 20.0..40.0 | 2.00 | 60 % |", done.stdout)
        self.assertIn("| decode 4 rows | switchyard | 120 | 80.0..160 | 5.33 | 60 % |", done.stdout)
        self.assertIn("| model.gguf | 2 | prefill 512 | 225 | 38 % | 1.50 (llama.cpp, no repack) | 1.50 (llama.cpp, no repack) |",
                      done.stdout)
        self.assertIn("Limits during the runs: read GB/s 25.0..50.0", done.stdout)

    def test_engines_take_turns_in_processes_of_their_own(self):
        self.compare("--llama-python", self.program("python", PYTHON))
        self.assertEqual([(run["round"], run["engine"]) for run in self.runs],
                         [(1, "switchyard"), (1, "llama.cpp"), (1, "llama.cpp, no repack"),
                          (2, "llama.cpp"), (2, "llama.cpp, no repack"), (2, "switchyard")])
        with open(os.path.join(self.folder, "switchyard.calls"), encoding="utf-8") as file:
            calls = [json.loads(line) for line in file]
        self.assertEqual([call[0] for call in calls if "f16" in call], ["bench", "bench", "run"] * 2)
        # And what the machine gives, around each of the others.
        self.assertEqual([call[0] for call in calls[4:10]], ["bench"] * 6)
        self.assertNotIn(self.model, sum(calls[4:10], []))

    def test_json_holds_every_run_and_gives_the_same_tables(self):
        done = self.compare()
        self.assertEqual(self.runs[0]["rates"], {"prefill 512": 300, "decode": 40, "decode 4 rows": 160})
        self.assertAlmostEqual(self.runs[0]["limits"]["prefill 512"], 600)
        self.assertEqual(self.runs[0]["version"], "switchyard 9.9")
        self.assertGreater(self.runs[0]["first_token_s"], 0)
        self.assertGreater(self.runs[0]["peak_rss_gb"], 0)
        self.assertEqual(self.tool("compare", "--from", self.json).stdout, done.stdout)

    def test_a_build_that_leaves_much_of_the_cpu_idle_is_named(self):
        if not unused_features(""):
            self.skipTest("no AVX2 here")
        done = self.compare("--rounds", "1", "--llama-python", self.program("python", PYTHON.replace("AVX2 = 1", "AVX2 = 0")))
        note = "llama-cpp-python 1.2 built without AVX2"
        self.assertIn(f"{note}, which this CPU has; install it with CMAKE_ARGS=-DGGML_NATIVE=ON\n", done.stderr)
        self.assertIn(f"llama.cpp: {note}; llama.cpp, no repack: {note}.", done.stdout)

    def test_append_adds_rounds(self):
        self.compare()
        self.compare("--append", "--rounds", "1")
        self.assertEqual([run["round"] for run in self.runs], [1, 2, 3])

    def test_a_peer_that_fails_gives_its_last_line_and_the_rest_goes_on(self):
        failing = self.program("failing", 'import sys; sys.exit("first\\nno memory left\\n")')
        silent = self.program("silent", 'print("{}")')
        done = self.compare("--engine", f"failing={failing}", "--engine", f"silent={silent}",
                            "--engine", "absent=/no/such/engine")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("failing, round 1: exit code 1: no memory left", done.stdout)
        self.assertIn("silent, round 2: no JSON line with pp_tps and tg_tps", done.stdout)
        self.assertIn("absent, round 1: /no/such/engine: No such file or directory", done.stdout)
        self.assertIn("baseline llama.cpp did not run: ratios are to switchyard", done.stderr)
        self.assertEqual(len(self.runs), 8)

    def test_what_was_measured_before_a_failure_counts(self):
        done = self.compare(switchyard=SWITCHYARD.replace("rate = pace", "assert rows == 1, 'too many'; rate = pace"))
        self.assertEqual(self.runs[0]["rates"], {"prefill 512": 300, "decode": 40})
        self.assertIn("switchyard, round 1: exit code 1: AssertionError: too many", done.stdout)

    def test_missing_engines_are_named_and_skipped(self):
        done = self.compare("--llama-python", "/no/python", "--llama-bench", "ik=/no/llama-bench")
        self.assertEqual(done.returncode, 0)
        self.assertIn("llama-cpp-python: skipped: /no/python: No such file or directory\n", done.stderr)
        self.assertIn("ik: skipped: /no/llama-bench: no such program\n", done.stderr)

    def test_llama_bench_and_its_batched_neighbour(self):
        self.program("llama-batched-bench", BATCHED)
        bench = self.program("llama-bench", LLAMA_BENCH)
        done = self.compare("--llama-bench", f"ik -rtr={bench}:-rtr 1:-rtr", "--baseline", "ik", "--no-llama-python")
        self.assertEqual(done.returncode, 0, done.stderr)
        ik = self.runs[1]
        self.assertEqual(ik["rates"], {"prefill 512": 160, "decode": 30, "decode 4 rows": 64})
        self.assertEqual((ik["version"], ik["error"]), ("commit abc", None))
        with open(bench + ".calls", encoding="utf-8") as file:
            self.assertEqual(json.loads(file.readline())[-2:], ["-rtr", "1"])
        self.assertIn("to ik, its best mode", done.stdout)

    def test_command_with_batch_runs_once_for_each(self):
        engine = self.program("engine", SLOWER + """
print(json.dumps({"pp_tps": 1.0, "tg_tps": 2.0 * int(option("-b")), "load_s": 3, "rss_gb": 4}))""")
        self.compare("--engine", f"mine={engine} {{model}} -t {{threads}} -b {{batch}}", "--no-llama-python")
        self.assertEqual(self.runs[1]["rates"], {"prefill 512": 1, "decode": 2, "decode 4 rows": 8})
        self.assertEqual((self.runs[1]["first_token_s"], self.runs[1]["peak_rss_gb"]), (3.5, 4))

    def test_bad_arguments(self):
        for arguments, message in ((["/no/model.gguf"], "compare: /no/model.gguf: no such file"),
                                   ([], "give either MODEL.gguf or --from FILE"),
                                   ([self.model, "--threads", "0"], "--threads"),
                                   ([self.model, "--llama-bench", "ik"], "expected NAME=PATH"),
                                   ([self.model, "--engine", "mine=x {wrong}"], "placeholders are"),
                                   (["--from", self.model], "no runs of bench/compare")):
            done = self.tool("compare", *arguments, *(["--no-llama-python"] if arguments[:1] == [self.model] else []))
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_interrupt_ends_the_engine_and_shows_what_there_is(self):
        pid_file = os.path.join(self.folder, "pid")
        engine = self.program("engine", f"import os, time\nopen({pid_file + '.part'!r}, 'w').write(str(os.getpid()))\n"
                              f"os.rename({pid_file + '.part'!r}, {pid_file!r})\ntime.sleep(600)")
        compare = subprocess.Popen([sys.executable, os.path.join(HERE, "compare"), self.model, "--no-llama-python",
                                    "--threads", "2", "--switchyard", self.program("switchyard", SWITCHYARD),
                                    "--engine", f"slow={engine}"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not os.path.exists(pid_file):
            self.assertIsNone(compare.poll())
            time.sleep(0.02)
        compare.send_signal(signal.SIGINT)
        out, err = compare.communicate()
        self.assertEqual(compare.returncode, 130)
        self.assertIn("interrupted", err)
        self.assertIn("prefill 512", out)
        with open(pid_file, encoding="utf-8") as file, self.assertRaises(ProcessLookupError):
            os.kill(int(file.read()), 0)


class PartsTest(unittest.TestCase):
    def test_specs(self):
        self.assertEqual(split_spec("ik=/bin/x", "--o"), ("ik", "/bin/x", [], []))
        self.assertEqual(split_spec("a b=/bin/x:-r 1 -q", "--o"), ("a b", "/bin/x", ["-r", "1", "-q"], ["-r", "1", "-q"]))
        self.assertEqual(split_spec("a=/bin/x:-r 1:-r", "--o"), ("a", "/bin/x", ["-r", "1"], ["-r"]))

    def test_last_json_line_with_the_fields_counts(self):
        self.assertEqual(json_line('{"a": 1}\n{"a": 2}\n{"b": 3}\n{broken', "a"), {"a": 2})
        with self.assertRaises(EngineError):
            json_line("", "a")

    def test_batched_table(self):
        row = "|  1 |  16 |  4 |  68 | 0.1 | 10 | 1.0 | {} | 1.1 | 61 |\n"
        self.assertEqual(batched_rates("| 1 | 2 | x |\n" + row.format(64.5) + row.format(65.5)), {4: 65})

    def test_timeout(self):
        with self.assertRaisesRegex(EngineError, "longer than 0.2 s"):
            run([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)

    def test_ratios_are_taken_round_by_round(self):
        rates = {"a": [10, 40, 60], "b": [20, 50, 30]}  # medians 40 and 30, but 0.5, 0.8 and 2 times as fast
        cell = report.Cell([{"engine": engine, "round": i, "rates": {"decode": rate}} for engine in rates
                            for i, rate in enumerate(rates[engine])])
        self.assertAlmostEqual(cell.ratio("a", "b", "decode"), 0.8)
        self.assertEqual(cell.base("b", "decode"), "b")
        self.assertIsNone(cell.ratio("a", "c", "decode"))

    def test_share_is_of_the_limit_around_the_run(self):
        machines = {"switchyard": [], "peer": [{"read_gbps": 10}, {"read_gbps": 40}], "unseen": []}
        cell = report.Cell([{"engine": engine, "round": 1, "rates": {"decode": 8}, "machine": machines[engine],
                             "limits": {"decode": 10} if engine == "switchyard" else {},
                             "work": {"decode": ["read_gbps", 2]} if engine == "switchyard" else {}} for engine in machines])
        self.assertAlmostEqual(cell.share("switchyard", "decode"), 0.8)
        self.assertAlmostEqual(cell.share("peer", "decode"), 0.4)
        self.assertIsNone(cell.share("unseen", "decode"))

    def test_modes(self):
        self.assertTrue(report.is_mode_of("ik -rtr", "ik"))
        self.assertTrue(report.is_mode_of("llama.cpp, no repack", "llama.cpp"))
        self.assertFalse(report.is_mode_of("ikra", "ik"))


class RooflineTest(Case):
    def test_every_point_and_roof_is_drawn(self):
        data = self.write("data.json", lines_of("bf16", "q4_k<"))
        picture = os.path.join(self.folder, "picture.svg")
        done = self.tool("roofline", data, picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        svg = xml.etree.ElementTree.parse(picture).getroot()
        name = "{http://www.w3.org/2000/svg}"
        hints = [title.text for title in svg.iter(f"{name}title")]
        self.assertEqual(len(hints), 8)
        self.assertIn("q4_k<, decode, 4 rows: 8 operations a byte, 158 Gop/s, 50 % of its limit", hints)
        self.assertIn("bf16, prompt of 512: 300 operations a byte, 480 Gop/s, 60 % of its limit", hints)
        texts = [text.text for text in svg.iter(f"{name}text")]
        for label in ("int8 800 Gop/s", "bf16 400 Gop/s", "f32 200 Gop/s", "read 41 to 56 GB/s", "decode, 16 rows",
                      "prompt of 512"):
            self.assertIn(label, texts)

    def test_measures_with_the_given_program(self):
        program = self.program("switchyard", "import json, sys\nrows = int(sys.argv[sys.argv.index('-b') + 1])\n"
                               f"print(json.dumps({bench_line('', 1)!r} | dict(batch=rows)))")
        data, picture = os.path.join(self.folder, "data.json"), os.path.join(self.folder, "picture.svg")
        done = self.tool("roofline", data, picture, "--measure", "bf16,q8_0", "--batch", "1,2", "--switchyard", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(data, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([(line["scheme"], line["batch"]) for line in lines],
                         [("bf16", 1), ("bf16", 2), ("q8_0", 1), ("q8_0", 2)])

    def test_bad_data(self):
        for content, message in (("{}\n", "not lines of switchyard bench"), ("x\n", "roofline:"), ("", "no line")):
            done = self.tool("roofline", self.write("data.json", content), os.path.join(self.folder, "picture.svg"))
            self.assertEqual(done.returncode, 1)
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
