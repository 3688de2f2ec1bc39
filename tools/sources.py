"""Our source files, what they include, and running a command over many of them: shared by the checks in this folder."""
import concurrent.futures
import hashlib
import os
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOPS = ("include", "src", "apps", "tests", "bench", "fuzz", "python", "models")  # where C++ of our own lies
SUFFIXES = (".h", ".cc", ".def", ".S")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)')


def strip_comments(text):
    """Blanks comments out; what remains keeps its lines and columns."""
    def blank(match):
        return match.group(0) if match.group(0)[0] == '"' else re.sub(r"[^\n]", " ", match.group(0))
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.S)


class Tree:
    """The sources under a root and what each includes. Paths are relative to the root."""

    def __init__(self, root=ROOT):
        self.root = root
        self.files = []
        self.folders = []
        for top in TOPS:
            for folder, subfolders, names in os.walk(os.path.join(root, top)):
                subfolders[:] = sorted(name for name in subfolders if name not in ("__pycache__", "corpus", "target"))
                relative = os.path.relpath(folder, root).replace(os.sep, "/")
                self.folders.append(relative)
                self.files += [f"{relative}/{name}" for name in sorted(names) if name.endswith(SUFFIXES)]
        self.known = set(self.files)
        self.includes = {path: self._read(path) for path in self.files}

    def text(self, path):
        with open(os.path.join(self.root, path), encoding="utf-8") as source:
            return source.read()

    def _read(self, path):
        """[(line, name as written, our file that it means or None, quoted)]"""
        found = []
        for number, line in enumerate(strip_comments(self.text(path)).split("\n"), 1):
            match = INCLUDE.match(line)
            if match:
                name = match.group(1) or match.group(2)
                found.append((number, name, self._resolve(path, name), match.group(1) is not None))
        return found

    def _resolve(self, path, name):
        beside = os.path.normpath(os.path.join(os.path.dirname(path), name)).replace(os.sep, "/")
        for candidate in (beside, f"include/{name}", f"src/{name}", f"tests/{name}", name):
            if candidate in self.known:
                return candidate
        return None

    def closure(self, path):
        """The file and all of ours that it includes, directly or not."""
        reached, pending = set(), [path]
        while pending:
            current = pending.pop()
            if current not in reached:
                reached.add(current)
                pending += [target for _, _, target, _ in self.includes[current] if target]
        return sorted(reached)

    def fingerprint(self, path, *settings):
        """Changes when the file, one that it includes, or a setting does."""
        digest = hashlib.sha256("\0".join(settings).encode())
        for name in self.closure(path):
            digest.update(f"\0{name}\0{self.text(name)}".encode())
        return digest.hexdigest()


def cache_folder():
    return os.environ.get("SWITCHYARD_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "switchyard")


def run_all(jobs, kind):
    """Runs jobs, [(path, fingerprint, command)], on all CPUs and prints the output of those that fail.

    A job that passed is remembered by its fingerprint, in the cache that clones of the repository share, and is not run
    again. Returns (number that ran, number that failed).
    """
    folder = os.path.join(cache_folder(), kind)
    os.makedirs(folder, exist_ok=True)
    pending = [job for job in jobs if not os.path.exists(os.path.join(folder, job[1]))]

    def run(job):
        result = subprocess.run(job[2], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        return job, result.returncode, result.stdout

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (path, fingerprint, _), status, output in pool.map(run, pending):
            if status == 0:
                with open(os.path.join(folder, fingerprint), "w", encoding="utf-8"):
                    pass
            else:
                failed += 1
                print(f"{path}:\n{output}", flush=True)
    return len(pending), failed
