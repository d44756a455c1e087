"""Find the rank that failed first, its error, and its place in the script; report on the failed ranks of a job.

The process that *ends* first need not be the one: a rank that raises takes a while to shut down, and another one may
die of the consequences meanwhile. Each rank that uses npu_device therefore writes a record at the moment it fails
(``cluster.health`` writes it). For other programs, the time of their end counts.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from npu_device._src.cluster.frames import counted
from npu_device._src.cluster.tracebacks import CHAIN, FRAME, HEADER, is_users, root_error, without_libraries
from npu_device.launch.processes import Exit

_LAST_LINES = 20
# Sent from outside, by a person, the system or a scheduler: where the script was then means nothing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Errors that a rank raises, wherever it is, when another rank is lost.
_LOST_PEER = ("PeerError", "RendezvousError", "UnavailableError", "DeadlineExceededError", "AbortedError")


@dataclass(frozen=True)
class Record:
    """A rank's own record of its failure."""

    time: float  # seconds since the epoch
    error: str
    traceback: str  # the whole traceback
    secondary: bool  # the error is a consequence of another rank's failure


def read_record(path: str) -> Record | None:
    """Return the record in a file; None if the rank left none, or an unusable one."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return Record(float(found["time"]), str(found["error"]), str(found["traceback"]), bool(found["secondary"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Failure:
    """A rank that ended with any exit code except 0."""

    rank: int
    exit: Exit
    record: Record | None
    stopped: bool  # the process ended after the launcher asked it to
    stderr: tuple[str, ...] = ()  # the last lines of its stderr

    @property
    def time(self) -> float:
        """Return the time of the failure, in seconds since the epoch."""
        return self.record.time if self.record else self.exit.time

    @property
    def is_consequence(self) -> bool:
        """Return True if another rank's failure, or the launcher, made this rank fail."""
        return self.record.secondary if self.record else self.stopped

    @property
    def error(self) -> str:
        """Return the line that says most about its error: type and message; "" if no exception is known."""
        if self.record and self.record.error.strip():
            return headline(self.record.error)
        lines = self._traceback()
        begin = _last_header(lines)
        # The traceback is indented.
        end = next((number for number in range(begin + 1, len(lines)) if lines[number][:1].strip()), len(lines))
        return headline(root_error("\n".join(lines[end:]))) if any(map(FRAME.match, lines)) else ""

    @property
    def frames(self) -> list[tuple[str, str]]:
        """Return the frames of its last traceback, as file and line."""
        lines = self._traceback()
        found = map(FRAME.match, lines[_last_header(lines) :])
        return [(match["file"], match["line"]) for match in found if match]

    def evidence(self) -> tuple[str, int]:
        """Return its traceback, or the last lines of its stderr, and how many frames of libraries are left out."""
        return without_libraries("".join(line + "\n" for line in self._traceback()))

    def _traceback(self) -> list[str]:
        """Return the lines of its own record, else of the last traceback on its stderr, else its last lines."""
        if self.record and self.record.traceback:
            return self.record.traceback.rstrip().splitlines()
        return _excerpt(list(self.stderr))

    @property
    def code(self) -> int:
        """Return the exit code to report: 1, an exception's, for a rank that raised before the launcher killed it."""
        return 1 if self.record and self.stopped else self.exit.code


@dataclass(frozen=True)
class Cause:
    """The failure of a rank, as the nodes tell each other."""

    rank: int
    host: str
    what: str  # how it ended, and its error
    time: float  # seconds since the epoch
    is_consequence: bool  # it follows from another failure
    place: str | None  # where in the script it failed; None if the script isn't to blame

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}: {self.what}"


def cause_of(failure: Failure, host: str) -> Cause:
    """Return the cause of a failed rank of this host."""
    what = str(failure.exit)
    if failure.error:
        what += f": {failure.error}"
    return Cause(
        rank=failure.rank,
        host=host,
        what=what,
        time=failure.time,
        is_consequence=failure.is_consequence,
        place=_place(failure),
    )


def first(causes: Sequence[Cause]) -> Cause | None:
    """Return the earliest failure that no other one caused."""
    return min(causes, key=lambda cause: (cause.is_consequence, cause.time), default=None)


def _place(failure: Failure) -> str | None:
    kind, frames = _kind(failure.error), failure.frames
    if kind in _LOST_PEER:
        return None
    if failure.record is None and failure.exit.code - 128 in _FROM_OUTSIDE:
        return None
    if not frames or (failure.record is None and failure.exit.status < 0):
        return f"rank {failure.rank}, {failure.exit}"
    own = [(file, line) for file, line in frames if is_users(file)]
    file, line = (own or frames)[-1]
    return f"{file}:{line} ({kind})"


def _kind(error: str) -> str:
    """Return the type of an error without its module."""
    return error.partition(":")[0].rpartition(".")[2].strip()


def in_order(failures: list[Failure]) -> list[Failure]:
    """Return failures in order: first causes, then the errors that follow from them, then ranks that were stopped."""

    def key(failure: Failure) -> tuple[bool, bool, float]:
        consequence = failure.is_consequence
        return consequence, consequence and failure.record is None, failure.time

    return sorted(failures, key=key)


def summary(failures: list[Failure], world_size: int, nnodes: int, host: str, started: float) -> str:
    """Return one line per failed rank, with the first failure last."""
    first, *others = failures
    lines = []
    if others:
        stopped = sum(failure.stopped and failure.record is None for failure in failures)
        also = f"; npurun stopped {counted(stopped, 'rank')}" if stopped else ""
        lines.append(f"{len(failures) - stopped} of {world_size} ranks ended with an error on host {host}{also}:")
        lines += [f"  {_line(failure, started)}" for failure in reversed(others)]
    if first.is_consequence and nnodes > 1:
        lines.append("a failure on another node has caused this: look at the output of npurun on the other nodes.")
    lines.append(f"the first failure on host {host}: {_line(first, started)}")
    return "\n".join(lines)


def headline(error: str) -> str:
    """Return the line that says most about an error: an exception's type and message, "" without one."""
    lines = [line.strip() for line in error.strip().splitlines()] or [""]
    if lines[0].startswith('File "'):  # a syntax error, which comes after its place
        return f"{lines[-1]} ({lines[0]})"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _line(failure: Failure, started: float) -> str:
    how = f"stopped by npurun, {failure.exit}" if failure.stopped else str(failure.exit)
    line = f"rank {failure.rank}: {how}, {failure.time - started:.1f} s after the start"
    return f"{line}: {failure.error}" if failure.error else line


def _last_header(lines: list[str]) -> int:
    """Return where the last traceback begins; a syntax error in the script itself has no header."""
    headers = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
    return (headers or frames or [0])[-1]


def _excerpt(lines: list[str]) -> list[str]:
    """Return the last traceback among the lines of a stderr, with the errors that caused it; else the last lines."""
    headers = [number for number, line in enumerate(lines) if HEADER.match(line)]
    if not headers:
        return lines[-_LAST_LINES:]
    start = headers.pop()
    while headers and any(CHAIN.match(line) for line in lines[max(start - 2, 0) : start]):
        start = headers.pop()
    return lines[start:]
