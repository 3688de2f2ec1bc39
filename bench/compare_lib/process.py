"""Runs one program to its end: what it wrote, how long it took, and the most memory it held."""
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass


class EngineError(Exception):
    """An engine that did not run, or whose output holds no figures: one line for the reader."""


@dataclass
class Finished:
    stdout: str
    stderr: str
    seconds: float  # wall time from start to exit
    peak_rss_gb: float  # of the program or of the largest of its children


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def run(command, timeout, threads=None, cwd=None):
    """Runs `command` in a process group of its own, which ends with it, with Ctrl-C and after `timeout` seconds.
    Raises EngineError with the last line of standard error if it cannot be started, fails, or takes too long."""
    env = dict(os.environ)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        start = time.perf_counter()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd,
                                       start_new_session=True)
        except OSError as error:
            raise EngineError(f"{command[0]}: {error.strerror}") from None
        try:
            usage = wait(process, timeout)
        finally:
            kill_group(process)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        complaints = err.read()
        if process.returncode != 0:
            reason = last_line(complaints) or "nothing on standard error"
            raise EngineError(f"exit code {process.returncode}: {reason}")
        return Finished(out.read(), complaints, seconds, usage.ru_maxrss * 1024 / 1e9)


def wait(process, timeout):
    """Reaps the process with what it used, asleep meanwhile: polling would take time from the engine."""

    def expire(*_):
        raise EngineError(f"took longer than {timeout:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if process.returncode is None:
        process.wait()
