"""Runs one process of a benchmark and watches its memory. Knows no engine."""

import dataclasses
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.measures import Job

ROOT = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.1
TIMEOUT_SECONDS = 3600


class ProcessError(RuntimeError):
    """A process ended with a status other than 0; the text has its last words."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a process left behind."""

    output: str
    """Its standard output."""
    seconds: float
    """From its start to its end."""
    peak_gib: float
    """The most memory that was mapped and present at once, pages of files included."""
    anonymous_gib: float
    """Of it, in the fullest sample, what is no page of a file."""


def parse_status(text: str) -> dict[str, int]:
    """The sizes in /proc/PID/status, in KiB."""
    return {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


class _Watch(threading.Thread):
    """Samples a process's memory until told to stop.

    `ru_maxrss` would do, but a child starts with its parent's: Linux keeps the mark across exec.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._file = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self.peak = self.fullest = self.anonymous = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                sizes = parse_status(self._file.read_text())
            except (FileNotFoundError, ProcessLookupError):
                return
            self.peak = max(self.peak, sizes.get("VmHWM", 0))
            if sizes.get("VmRSS", 0) > self.fullest:
                self.fullest = sizes["VmRSS"]
                self.anonymous = sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self.join()


def run(
    command: Sequence[str | Path],
    *,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Finished:
    """Runs `command` with `text` as its input and `environment` on top of this one.

    Its standard error goes to `log`, by default where this process's goes.

    Raises:
        ProcessError: it ended with a status other than 0, or did not end within an hour.
    """
    name = Path(command[0]).name
    begun = time.perf_counter()
    with (log or Path(os.devnull)).open("w+") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors if log else None,
            env={**os.environ, **(environment or {})},
            text=True,
        )
        watch = _Watch(child.pid)
        watch.start()
        try:
            output, _ = child.communicate(text, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            child.kill()
            child.communicate()
            raise ProcessError(f"{name} did not end within {TIMEOUT_SECONDS} s") from error
        finally:
            watch.stop()
        took = time.perf_counter() - begun
        if child.returncode:
            errors.seek(0)
            words = errors.read().strip() or output.strip() or "it said nothing"
            last = words.splitlines()[-1]
            raise ProcessError(f"{name} ended with status {child.returncode}: {last}")
    return Finished(output, took, watch.peak / 2**20, watch.anonymous / 2**20)


def run_job(
    command: Sequence[str | Path],
    job: Job,
    *,
    log: Path | None = None,
) -> dict[str, float]:
    """Hands `job` to a process whose body is `bench.measures.main`: its figures, and its memory.

    Raises:
        ProcessError: as `run`.
    """
    job = dataclasses.replace(job, begun=time.monotonic())
    text = json.dumps(dataclasses.asdict(job))
    # For interpreters of other environments, which have no `bench`.
    done = run(command, text=text, environment={"PYTHONPATH": str(ROOT)}, log=log)
    figures: dict[str, float] = json.loads(done.output.splitlines()[-1])
    return {**figures, "peak_gib": done.peak_gib, "anonymous_gib": done.anonymous_gib}
