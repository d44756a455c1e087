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

from npu_device._src.cluster.root_error import root_error
from npu_device._src.cluster.tracebacks import PrintedError, from_record, is_user_file, parse
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


@dataclass(frozen=True)
class _Record:
    """What a rank has left of its failure, or else what its end and its stderr say of it."""

    time: float
    error: str  # type and message; empty if no exception is known
    is_consequence: bool
    errors: list[PrintedError]  # the whole chain


def examine(
    rank: int, host: str, ended: Exit, record_file: str, stopped: bool, stderr: Sequence[str]
) -> tuple[Failure, list[PrintedError]]:
    """Return the failure of a rank, and its errors: of its record, else the last ones on its stderr."""
    recorded = True
    try:
        record = _read(record_file)
    except (OSError, ValueError, KeyError, TypeError):  # it left none, or an unusable one
        recorded = False
        errors = _last_errors(stderr)
        is_known = any(error.frames() for error in errors)
        text = root_error(errors[-1].text()) if is_known else ""
        record = _Record(ended.time, text, stopped, errors)
    headline = _headline(record.error)
    error_type = headline.partition(":")[0].rpartition(".")[2].strip()
    frames = [frame for error in record.errors for frame in error.frames()]
    place: str | None
    if error_type in _LOST_PEER or (not recorded and ended.code - 128 in _FROM_OUTSIDE):
        place = None
    elif not frames or (not recorded and ended.status < 0):
        place = f"rank {rank}, {ended}"
    else:
        user_frames = [frame for frame in frames if is_user_file(frame.file)]
        innermost = (user_frames or frames)[-1]
        place = f"{innermost.file}:{innermost.line} ({error_type})"
    failure = Failure(
        rank=rank,
        host=host,
        end=str(ended),
        code=1 if recorded and stopped else ended.code,
        stopped=stopped,
        recorded=recorded,
        is_consequence=record.is_consequence,
        time=record.time,
        error=headline,
        place=place,
    )
    return failure, record.errors


def _read(path: str) -> _Record:
    with open(path, encoding="utf-8") as file:
        fields = json.load(file)
    return _Record(
        time=float(fields["time"]),
        error=str(fields["error"]),
        is_consequence=bool(fields["secondary"]),
        errors=from_record(fields["errors"]),
    )


def _last_errors(stderr: Sequence[str]) -> list[PrintedError]:
    """Return the last error on a stderr, after those that caused it; else the last lines."""
    errors = parse(stderr)
    if len(errors) == 1:  # no traceback
        return [PrintedError("", "", errors[0].blocks[-_LAST_LINES:])]
    first = len(errors) - 1
    while first > 1 and errors[first].link:
        first -= 1
    return errors[first:]


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
