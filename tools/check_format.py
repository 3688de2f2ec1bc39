#!/usr/bin/env python3
"""tools/check_format.py [--fix] [FILE...]

clang-format 16 over our C++ (.clang-format), all of it by default. It leaves comment lines that start with a label
("Errors:", "Shapes:", ...) alone, so that they keep their own line; this script holds those to 100 columns too.
"""
import os
import re
import subprocess
import sys
import textwrap

import sources

COLUMNS = 100
CLANG_FORMAT = "clang-format-16"


def labels():
    """The words that .clang-format lists in CommentPragmas."""
    with open(os.path.join(sources.ROOT, ".clang-format"), encoding="utf-8") as config:
        return re.search(r"^CommentPragmas: '\^ \*(\(.*\))'$", config.read(), re.M).group(1)


def wrap(lines, label):
    """The lines with every labelled comment of too long lines filled anew; its later lines are indented by two more."""
    result, at = [], 0
    while at < len(lines):
        start = re.match(rf"(\s*//) *{label}\b", lines[at])
        end = at + 1
        if start:
            # The comment goes on until a blank or other label, or a sentence that ends with the line.
            while (end < len(lines) and re.match(rf"{start.group(1)} +\S", lines[end])
                   and not re.match(rf"\s*// *{label}\b", lines[end])
                   and not (lines[end - 1].endswith(".") and re.match(r"\s*// [A-Z]", lines[end]))):
                end += 1
        paragraph = lines[at:end]
        if start and "NOLINT" not in paragraph[0] and any(len(line) > COLUMNS for line in paragraph):
            text = " ".join(line.strip()[2:].strip() for line in paragraph)
            paragraph = textwrap.wrap(text, COLUMNS, initial_indent=start.group(1) + " ", break_long_words=False,
                                      subsequent_indent=start.group(1) + "   ", break_on_hyphens=False)
        result += paragraph
        at = end
    return result


def main():
    fix = "--fix" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--fix"]
    files = [os.path.relpath(name, sources.ROOT) for name in names] or [
        path for path in sources.Tree().files if path.endswith((".h", ".cc"))]
    os.chdir(sources.ROOT)
    label = labels()
    bad = 0
    for path in files:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
        if fix:
            wrapped = wrap(lines, label)
            if wrapped != lines:
                with open(path, "w", encoding="utf-8") as file:
                    file.write("\n".join(wrapped))
            continue
        for number, line in enumerate(lines, 1):
            if len(line) > COLUMNS and re.match(rf"\s*// *{label}", line) and "NOLINT" not in line:
                print(f"{path}:{number}: comment line of {len(line)} columns; the limit is {COLUMNS}")
                bad += 1
    batches = [files[first:first + 20] for first in range(0, len(files), 20)]
    jobs = [subprocess.Popen([CLANG_FORMAT, *(["-i"] if fix else ["--dry-run", "-Werror"]), *batch], text=True,
                             stderr=subprocess.PIPE) for batch in batches]
    output = "".join(job.communicate()[1] for job in jobs)
    places = {}
    for path, line in re.findall(r"^(.*?):(\d+):\d+: error:", output, re.M):
        places.setdefault(path, line)
    for path, line in places.items():
        print(f"{path}:{line}: not formatted, here first")
    if bad or any(job.returncode for job in jobs):
        if not places:
            print(output)
        print("tools/check format --fix puts this right")
        return 1
    print(f"{len(files)} files formatted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
