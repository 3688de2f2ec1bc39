#!/usr/bin/env python3
"""tools/check_compile.py headers|tidy [FILE...]

headers  compiles every header of include/ and src/ alone: it must include what it uses. A header of include/ sees
         neither src/ nor Highway.
tidy     clang-tidy 16 (.clang-tidy) over the sources of src, apps, models and fuzz, or over the given files, with the
         flags of the preset release-clang. Tests are linted only when named: they are half of the code and of the time.

Both remember what passed (see sources.run_all), so that a second run looks at changes only.
"""
import json
import os
import shlex
import subprocess
import sys

import sources

BUILD = os.path.join(sources.ROOT, "build", "release-clang")
LINTED = ("src/", "apps/", "models/", "fuzz/")
# One instruction set of the six that a kernel is compiled for: the code is the same, the time is not.
ONE_TARGET = "-DHWY_COMPILE_ONLY_EMU128"


def version(command):
    return subprocess.run([command, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout


def mpi_includes():
    """Compiler flags for the folder of mpi.h; none without MPI."""
    try:
        flags = subprocess.run(["pkg-config", "--cflags-only-I", "mpi-c"], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [part for flag in flags for part in ("-isystem", flag[2:])]


def header_jobs(tree):
    compiler = "clang++-16"
    common = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wconversion", "-Werror",
              "-Wno-pragma-once-outside-header", "-Wno-unused-const-variable", "-x", "c++", "-Iinclude"]
    private = ["-Isrc", "-Irust/switchyard_text/include", "-isystem",
               os.path.join(sources.cache_folder(), "highway-1.2.0"), ONE_TARGET]
    mpi = mpi_includes()
    compiler_version = version(compiler)
    for path in tree.files:
        if path.startswith("src/parallel_mpi/") and not mpi:
            continue
        if path.endswith(".h") and not path.endswith("-inl.h") and path.startswith(("include/", "src/")):
            command = common + ([] if path.startswith("include/") else private)
            command += (mpi if path.startswith("src/parallel_mpi/") else []) + [path]
            yield path, tree.fingerprint(path, compiler_version, *command), command


def tidy_jobs(tree, names):
    with open(os.path.join(sources.ROOT, ".clang-tidy"), encoding="utf-8") as file:
        settings = [file.read(), version("clang-tidy-16")]
    with open(os.path.join(BUILD, "compile_commands.json"), encoding="utf-8") as file:
        commands = json.load(file)
    for entry in commands:
        path = os.path.relpath(os.path.join(entry["directory"], entry["file"]), sources.ROOT)
        wanted = path in names if names else path.startswith(LINTED)
        if not wanted or path not in tree.known or not path.endswith(".cc"):
            continue
        flags = [flag.replace(sources.ROOT, "") for flag in shlex.split(entry["command"])[1:]
                 if flag[:2] in ("-D", "-I", "-s", "-f")]
        yield (path, tree.fingerprint(path, *settings, *flags),
               ["clang-tidy-16", "--quiet", "-p", BUILD, f"--extra-arg={ONE_TARGET}", path])


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in ("headers", "tidy"):
        sys.exit(__doc__)
    kind, names = sys.argv[1], [os.path.relpath(name, sources.ROOT) for name in sys.argv[2:]]
    tree = sources.Tree()
    if kind == "headers":
        jobs = list(header_jobs(tree))
    else:
        # Configured anew each time, so that no file is missing.
        configured = subprocess.run(["cmake", "--preset", "release-clang"], cwd=sources.ROOT, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if configured.returncode != 0:
            print(configured.stdout)
            return 1
        jobs = list(tidy_jobs(tree, names))
    ran, failed = sources.run_all(jobs, kind)
    print(f"{len(jobs)} files, {len(jobs) - ran} of them unchanged since they passed, {failed} with errors")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
