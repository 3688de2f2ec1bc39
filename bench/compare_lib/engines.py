"""What can be compared. An engine yields, process by process, the figures that it measured."""
import importlib.util
import json
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass, field

from compare_lib.process import EngineError, run

LLAMA_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama_child.py")


@dataclass(frozen=True)
class Job:
    """What every engine is to do in a round."""
    model: str
    threads: int
    prompt: int
    tokens: int
    batches: tuple  # numbers of sequences decoded at once
    batch_tokens: int  # decoded tokens of each of several sequences
    repeats: int
    timeout: float

    @property
    def several(self):
        return [rows for rows in self.batches if rows > 1]

    @property
    def prefill(self):
        return f"prefill {self.prompt}"


def decode(rows):
    """The name of a figure: tokens per second of all rows."""
    return "decode" if rows == 1 else f"decode {rows} rows"


@dataclass
class Figures:
    """From one process; all of them may be absent."""
    rates: dict = field(default_factory=dict)  # tokens per second by name
    limits: dict = field(default_factory=dict)  # the rate that the machine's limit would allow, by name
    work: dict = field(default_factory=dict)  # by name: which limit of the machine it is, and how much of it a token takes
    machine: list = field(default_factory=list)  # the limits that the process found
    first_token_s: float | None = None  # from the start of the process
    peak_rss_gb: float | None = None


def json_line(text, *fields):
    """The last line that is a JSON object with these fields."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if all(name in found for name in fields):
                return found
    raise EngineError(f"no JSON line with {' and '.join(fields)} in its output")


MACHINE = ("read_gbps", "f32_gops", "bf16_gops", "int8_gops")


class Switchyard:
    def __init__(self, name, program, arguments):
        self.name, self.program, self.arguments = name, program, arguments
        self.version = run([program, "--version"], 60).stdout.strip()

    def bench(self, job, prompt, tokens, rows):
        done = run([self.program, "bench", job.model, "-p", str(prompt), "-n", str(tokens), "-b", str(rows),
                    "-r", str(job.repeats), "--threads", str(job.threads), "--kv-dtype", "f16", "--json", *self.arguments],
                   job.timeout)
        return json_line(done.stdout, "pp_tps", "tg_tps")

    def machine(self, job):
        """What the machine gives at this moment, measured beside the embedded model, whose own time is nothing."""
        done = run([self.program, "bench", "-p", "1", "-n", "1", "-r", "1", "--threads", str(job.threads), "--json"], job.timeout)
        line = json_line(done.stdout, *MACHINE)
        return {key: line[key] for key in MACHINE}

    def runs(self, job):
        for rows in job.batches:
            is_one = rows == 1
            line = self.bench(job, job.prompt if is_one else 1, job.tokens if is_one else job.batch_tokens, rows)
            figures = Figures(machine=[{key: line[key] for key in MACHINE}])
            peak = f"{line['peak_type']}_gops"
            for name, kind, limit in [(job.prefill, "pp", peak)] * is_one + [(decode(rows), "tg", "read_gbps")]:
                figures.rates[name] = line[f"{kind}_tps"]
                figures.limits[name] = line[f"{kind}_tps"] / line[f"{kind}_share_of_limit"]
                figures.work[name] = (limit, line[limit] / figures.limits[name])
            yield figures
        done = run([self.program, "run", job.model, "-p", "a", "--raw", "-n", "1", "--threads", str(job.threads),
                    "--kv-dtype", "f16", *self.arguments], job.timeout)
        yield Figures(first_token_s=done.seconds, peak_rss_gb=done.peak_rss_gb)


def unused_features(system):
    """What this CPU has and the build that describes itself as "AVX2 = 1 | …" leaves idle."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    names = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16"}
    return [name for flag, name in names.items() if flag in flags and f"{name} = 1" not in system]


class LlamaCppPython:
    """llama-cpp-python, in the interpreter that has it: weights repacked at load (its default), or as they lie."""

    def __init__(self, name, python, version, repack, unused):
        self.name, self.python, self.repack = name, python, repack
        self.version = version + (f" built without {', '.join(unused)}" if unused else "")
        self.note = f"{self.version}, which this CPU has; install it with CMAKE_ARGS=-DGGML_NATIVE=ON" if unused else ""

    @staticmethod
    def modes(python):
        """One engine for each mode that the installed version has."""
        done = run([python, LLAMA_CHILD, "--probe"], 60)
        probe = json_line(done.stdout, "version", "can_repack", "system")
        about = python, f"llama-cpp-python {probe['version']}"
        unused = unused_features(probe["system"])
        engines = [LlamaCppPython("llama.cpp", *about, True, unused)]
        if probe["can_repack"]:
            engines.append(LlamaCppPython("llama.cpp, no repack", *about, False, unused))
        return engines

    def child(self, job, *arguments):
        return run([self.python, LLAMA_CHILD, "--model", job.model, "--threads", str(job.threads),
                    *([] if self.repack else ["--no-repack"]), *arguments], job.timeout, job.threads)

    def runs(self, job):
        done = self.child(job, "--prompt", str(job.prompt), "--tokens", str(job.tokens), "--repeats", str(job.repeats),
                          "--batch", ",".join(map(str, job.several)), "--batch-tokens", str(job.batch_tokens))
        line = json_line(done.stdout, "pp_tps", "tg_tps")
        yield Figures({job.prefill: line["pp_tps"], decode(1): line["tg_tps"],
                       **{decode(int(rows)): rate for rows, rate in line["batch_tps"].items()}})
        done = self.child(job, "--first-token")
        yield Figures(first_token_s=done.seconds, peak_rss_gb=done.peak_rss_gb)


class LlamaBench:
    """llama-bench of llama.cpp or a fork of it, and llama-batched-bench beside it for several sequences."""

    def __init__(self, name, program, arguments, batched_arguments):
        if not os.access(program, os.X_OK):
            raise EngineError(f"{program}: no such program")
        self.name, self.program, self.version = name, os.path.abspath(program), ""
        self.arguments, self.batched_arguments = arguments, batched_arguments
        self.batched = os.path.join(os.path.dirname(self.program), "llama-batched-bench")

    def bench(self, job, prompt, tokens, repeats):
        with tempfile.TemporaryDirectory() as folder:
            done = run([self.program, "-m", job.model, "-t", str(job.threads), "-p", str(prompt), "-n", str(tokens),
                        "-r", str(repeats), "-fa", "1", "-o", "json", *self.arguments], job.timeout, job.threads, folder)
        try:
            rows = json.loads(done.stdout[done.stdout.index("["):])
            return done, [(row["n_prompt"] > 0, statistics.median(row["samples_ts"]), row.get("build_commit")) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"llama-bench wrote no table of JSON: {error}") from None

    def several(self, job):
        context = max(job.several) * 256 * -(-(job.batch_tokens + 1) // 256)
        with tempfile.TemporaryDirectory() as folder:
            done = run([self.batched, "-m", job.model, "-t", str(job.threads), "-c", str(context), "-b", "2048", "-ub", "512",
                        "-npp", "1", "-ntg", str(job.batch_tokens), "-npl", ",".join(map(str, job.several * job.repeats)),
                        "-fa", "on",
                        *self.batched_arguments], job.timeout, job.threads, folder)
        rates = batched_rates(done.stdout + done.stderr)  # llama.cpp writes the table here, ik_llama.cpp there
        if not rates:
            raise EngineError("llama-batched-bench wrote no table")
        return rates

    def runs(self, job):
        _, rows = self.bench(job, job.prompt, job.tokens, job.repeats)
        self.version = next((f"commit {commit}" for _, _, commit in rows if commit not in (None, "unknown")), "")
        yield Figures({job.prefill if is_prefill else decode(1): rate for is_prefill, rate, _ in rows})
        done, _ = self.bench(job, 1, 0, 1)
        yield Figures(first_token_s=done.seconds, peak_rss_gb=done.peak_rss_gb)
        if job.several and os.access(self.batched, os.X_OK):
            yield Figures({decode(rows): rate for rows, rate in self.several(job).items()})


def batched_rates(table):
    """Rows to their median tokens per second, from the table | PP | TG | B | N_KV | T_PP | S_PP | T_TG | S_TG | T | S |."""
    rates = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 10 and cells[2].isdigit():
            rates.setdefault(int(cells[2]), []).append(float(cells[7]))
    return {rows: statistics.median(repeats) for rows, repeats in rates.items()}


class Command:
    """Any program that prints a JSON line with pp_tps and tg_tps. With {batch} in the command it runs once for each
    number of sequences; load_s and rss_gb in the line are optional."""

    def __init__(self, name, command):
        self.name, self.command, self.version = name, command, ""
        try:
            self.split({"model": "", "threads": 1, "prompt": 1, "tokens": 1, "batch": 1})
        except (KeyError, IndexError, ValueError) as error:
            known = "{model} {threads} {prompt} {tokens} {batch}"
            raise EngineError(f"{command!r}: placeholders are {known}: {error}") from None

    def split(self, values):
        return [part.format(**values) for part in shlex.split(self.command)]

    def runs(self, job):
        for rows in job.batches if "{batch}" in self.command else (1,):
            values = {"model": job.model, "threads": job.threads, "prompt": job.prompt, "batch": rows,
                      "tokens": job.tokens if rows == 1 else job.batch_tokens}
            done = run(self.split(values), job.timeout, job.threads)
            line = json_line(done.stdout, "pp_tps", "tg_tps")
            self.version = str(line.get("version", ""))
            if rows > 1:
                yield Figures({decode(rows): line["tg_tps"]})
                continue
            first = line["load_s"] + 1 / line["tg_tps"] if "load_s" in line else None
            yield Figures({job.prefill: line["pp_tps"], decode(1): line["tg_tps"]}, first_token_s=first,
                          peak_rss_gb=line.get("rss_gb", done.peak_rss_gb))


def split_spec(spec, option):
    """NAME=PATH[:ARGUMENTS[:ARGUMENTS]]: the name, the path, and two lists, the second by default like the first."""
    name, found, rest = spec.partition("=")
    if not found or not name or not rest:
        raise EngineError(f"{option} {spec}: expected NAME=PATH[:ARGUMENTS]")
    path, *arguments = rest.split(":")
    lists = [shlex.split(text) for text in arguments] or [[]]
    return name, path, lists[0], lists[-1]


def collect(arguments, default_program):
    """All engines that are there, and a line about each that is not, or not as it could be."""
    engines, notes = [], []

    def add(label, make):
        try:
            made = make()
            engines.extend(made if isinstance(made, list) else [made])
        except EngineError as error:
            notes.append(f"{label}: skipped: {error}")

    for spec in arguments.switchyard or [f"switchyard={default_program}"]:
        name, path, extra, _ = split_spec(spec if "=" in spec else f"switchyard={spec}", "--switchyard")
        add(name, lambda: Switchyard(name, path, extra))
    python = arguments.llama_python
    if arguments.no_llama_python:
        pass
    elif python or importlib.util.find_spec("llama_cpp"):
        add("llama-cpp-python", lambda: LlamaCppPython.modes(python or sys.executable))
    else:
        notes.append("llama-cpp-python: skipped: not installed; pip install llama-cpp-python, or --llama-python PATH")
    for spec in arguments.llama_bench:
        name, path, extra, batched = split_spec(spec, "--llama-bench")
        add(name, lambda: LlamaBench(name, path, extra, batched))
    for spec in arguments.engine:
        name, found, command = spec.partition("=")
        if not found:
            raise EngineError(f"--engine {spec}: expected NAME=COMMAND")
        add(name, lambda: Command(name, command))
    names = [engine.name for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise EngineError(f"two engines are called {name!r}")
    notes += dict.fromkeys(engine.note for engine in engines if getattr(engine, "note", ""))
    return engines, notes
