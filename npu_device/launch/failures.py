"""Find the rank that failed first, its error, and its place in the script; report on the failed ranks of a job.

The process that *ends* first need not be the one. Each rank that uses npu_device therefore writes a record at the
moment it fails (``cluster.health``). For other programs, the time of their end and the last lines of their stderr
count.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from npu_device._src.cluster.tracebacks import CHAIN, FRAME, HEADER, is_user_file, root_error
from npu_device._src.wording import counted
from npu_device.launch.supervisor import Exit

_LAST_LINES = 20
# Sent from outside, by a person, the system or a scheduler: where the script was then means nothing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Errors that a rank raises, wherever it is, when another rank is lost.
_LOST_PEER = (
    "PeerError",
    "RendezvousError",
    "UnavailableError",
    "DeadlineExceededError",
    "AbortedError",
)


@dataclass(frozen=True)
class Failure:
    """A rank that ended with any exit code except 0, as the nodes tell each other."""

    rank: int
    host: str
    end: str  # how its process ended
    code: int  # to report: 1, as for an exception, if the rank had raised before the launcher killed it
    stopped: bool  # the process ended after the launcher asked it to
    recorded: bool  # the rank has left a record
    is_consequence: bool  # the failure of another rank, or the launcher, made this rank fail
    time: float  # seconds since the epoch
    error: str  # the line that says most about its error: type and message; "" if no exception is known
    place: str | None  # where in the script it failed; None if the script isn't to blame

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}: {self.end}" + (
            f": {self.error}" if self.error else ""
        )


def examine(
    rank: int, host: str, ended: Exit, record: str, stopped: bool, stderr: Sequence[str]
) -> tuple[Failure, list[str]]:
    """Return the failure of a rank, and its traceback: of its record, else the last one on its stderr."""
    try:
        with open(record, encoding="utf-8") as file:
            found = json.load(file)
        time, error, traceback = float(found["time"]), str(found["error"]), str(found["traceback"])
        is_consequence, recorded = bool(found["secondary"]), True
    except (OSError, ValueError, KeyError, TypeError):  # it left none, or an unusable one
        time, error, traceback, is_consequence, recorded = ended.time, "", "", stopped, False
    lines = traceback.rstrip().splitlines() if traceback else _excerpt(list(stderr))
    headers = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    begin = (headers or [number for number, line in enumerate(lines) if FRAME.match(line)] or [0])[
        -1
    ]
    if not error.strip() and any(map(FRAME.match, lines)):
        # The traceback is indented.
        end = next(
            (number for number in range(begin + 1, len(lines)) if lines[number][:1].strip()),
            len(lines),
        )
        error = root_error("\n".join(lines[end:]))
    error = _headline(error)
    kind = error.partition(":")[0].rpartition(".")[2].strip()  # the type without its module
    frames = [(match["file"], match["line"]) for match in map(FRAME.match, lines[begin:]) if match]
    if kind in _LOST_PEER or (not recorded and ended.code - 128 in _FROM_OUTSIDE):
        place = None
    elif not frames or (not recorded and ended.status < 0):
        place = f"rank {rank}, {ended}"
    else:
        file_, line = ([frame for frame in frames if is_user_file(frame[0])] or frames)[-1]
        place = f"{file_}:{line} ({kind})"
    code = 1 if recorded and stopped else ended.code
    return Failure(
        rank, host, str(ended), code, stopped, recorded, is_consequence, time, error, place
    ), lines


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Return first causes, then the errors that follow from them, then ranks that were stopped."""
    return sorted(
        failures,
        key=lambda one: (one.is_consequence, one.is_consequence and not one.recorded, one.time),
    )


def summary(failures: Sequence[Failure], world_size: int, nnodes: int, started: float) -> str:
    """Return one line per failed rank of this host, with the first failure last."""
    first, *others = failures
    lines = []
    if others:
        stopped = sum(failure.stopped and not failure.recorded for failure in failures)
        also = f"; npurun stopped {counted(stopped, 'rank')}" if stopped else ""
        lines.append(
            f"{len(failures) - stopped} of {world_size} ranks ended with an error on host {first.host}{also}:"
        )
        lines += [f"  {_line(failure, started)}" for failure in reversed(others)]
    if first.is_consequence and nnodes > 1:
        lines.append(
            "a failure on another node has caused this: look at the output of npurun on the other nodes."
        )
    lines.append(f"the first failure on host {first.host}: {_line(first, started)}")
    if "No module named 'horovod" in first.error:
        lines.append(
            "What to do: npurun --horovod, with which this package takes the place of Horovod."
        )
    return "\n".join(lines)


def _headline(error: str) -> str:
    lines = [line.strip() for line in error.strip().splitlines()] or [""]
    if lines[0].startswith('File "'):  # a syntax error, which comes after its place
        return f"{lines[-1]} ({lines[0]})"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _line(failure: Failure, started: float) -> str:
    how = f"stopped by npurun, {failure.end}" if failure.stopped else failure.end
    line = f"rank {failure.rank}: {how}, {failure.time - started:.1f} s after the start"
    return f"{line}: {failure.error}" if failure.error else line


def _excerpt(lines: list[str]) -> list[str]:
    """Return the last traceback among the lines of a stderr, with the errors that caused it; else the last lines."""
    headers = [number for number, line in enumerate(lines) if HEADER.match(line)]
    if not headers:
        return lines[-_LAST_LINES:]
    start = headers.pop()
    while headers and any(CHAIN.match(line) for line in lines[max(start - 2, 0) : start]):
        start = headers.pop()
    return lines[start:]
