"""Find the rank that failed first, its error, and its place in the script; report on the failed ranks of a job.

The process that *ends* first need not be the one. Each rank that uses npu_device therefore writes a record at the
moment it fails (``cluster.health``). For other programs, the time of their end and the last lines of their stderr
count.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_device._src.cluster.root_error import root_error
from npu_device._src.cluster.tracebacks import PrintedError, is_user_file, parse
from npu_device._src.wording import counted
from npu_device.launch.events import Exit

_LAST_LINES = 20
# Remarks and warnings of TensorFlow, of which each start has some: they would hide what the script has printed.
_REMARK = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] |To enable the following instructions: "
)
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
    # Exit code to report: 1, as for an exception, if the rank had raised before the launcher killed it.
    code: int
    stopped: bool  # the process ended after the launcher asked it to
    recorded: bool  # the rank has written its error to its record; if not, the error comes from its output
    is_consequence: bool  # the failure of another rank, or the launcher, made this rank fail
    time: float  # seconds since the epoch
    error: str  # the line that says most about its error: type and message; "" if no exception is known
    origin: str | None  # line of the script where it failed; None if the script isn't to blame

    def __str__(self) -> str:
        text = f"rank {self.rank} on host {self.host}: {self.end}"
        if self.error:
            text += f": {self.error}"
        return text


def examine(
    ended: Exit, record_file: str, stopped: bool, stderr: Sequence[str]
) -> tuple[Failure, list[PrintedError]]:
    """Return the failure of a rank, and its errors: of its record, else the last ones on its stderr."""
    recorded = True
    try:
        record = json.loads(Path(record_file).read_text(encoding="utf-8"))
        failed_at = float(record["time"])
        description = str(record["error"])
        is_consequence = bool(record["secondary"])
        errors = parse(str(record["traceback"]).splitlines())
    except (OSError, ValueError, KeyError, TypeError):
        # The rank may have left no record, or an unusable one.
        recorded = False
        failed_at = ended.time
        description = ""
        is_consequence = stopped
        errors = _last_errors(stderr)
        if any(error.frames() for error in errors):
            description = root_error(errors[-1].text())
    headline = _headline(description)
    error_type = headline.partition(":")[0].rpartition(".")[2].strip()
    frames = [frame for error in errors for frame in error.frames()]
    origin: str | None
    # The script isn't to blame for a lost rank, or for a kill from outside.
    # 128 and the number of a signal is the exit code of a process that a signal has ended.
    if error_type in _LOST_PEER or (not recorded and ended.code - 128 in _FROM_OUTSIDE):
        origin = None
    elif not frames or (not recorded and ended.status < 0):
        origin = f"rank {ended.rank}, {ended}"
    else:
        user_frames = [frame for frame in frames if is_user_file(frame.file)]
        innermost = (user_frames or frames)[-1]
        origin = f"{innermost.file}:{innermost.line} ({error_type})"
    code = ended.code
    # A rank that raised, and hung at its exit, has its error counted, not the signal of npurun.
    if recorded and stopped:
        code = 1
    failure = Failure(
        rank=ended.rank,
        host=socket.gethostname(),
        end=str(ended),
        code=code,
        stopped=stopped,
        recorded=recorded,
        is_consequence=is_consequence,
        time=failed_at,
        error=headline,
        origin=origin,
    )
    return failure, errors


def _last_errors(stderr: Sequence[str]) -> list[PrintedError]:
    """Return the last error on a stderr, after those that caused it; else the last lines."""
    errors = parse([line for line in stderr if not _REMARK.match(line)])
    # Without a traceback, there is a single text.
    if len(errors) == 1:
        return [PrintedError("", "", errors[0].blocks[-_LAST_LINES:])]
    begin = len(errors) - 1
    # Errors that are linked belong together: "during handling of the above exception".
    while begin > 1 and errors[begin].link:
        begin -= 1
    return errors[begin:]


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Return first causes, then the errors that follow from them, then ranks that were stopped."""
    return sorted(
        failures,
        key=lambda failure: (
            failure.is_consequence,
            failure.is_consequence and not failure.recorded,
            failure.time,
        ),
    )


def summary(failures: Sequence[Failure], world_size: int, nnodes: int, started: float) -> str:
    """Return one line per failed rank of this host, with the first failure last."""
    first_failure, *later_failures = failures
    lines = []
    if later_failures:
        stopped = sum(failure.stopped and not failure.recorded for failure in failures)
        # A rank that npurun stopped has no error of its own.
        count = len(failures) - stopped
        heading = f"{count} of {world_size} ranks ended with an error on host {first_failure.host}"
        if stopped:
            heading += f"; npurun stopped {counted(stopped, 'rank')}"
        lines.append(f"{heading}:")
        lines += [f"  {_line(failure, started)}" for failure in reversed(later_failures)]
    if first_failure.is_consequence and nnodes > 1:
        lines.append(
            "a failure on another node has caused this: look at the output of npurun on the other nodes."
        )
    lines.append(f"the first failure on host {first_failure.host}: {_line(first_failure, started)}")
    if "No module named 'horovod" in first_failure.error:
        lines.append(
            "What to do: npurun --horovod, with which this package takes the place of Horovod."
        )
    return "\n".join(lines)


def _headline(error: str) -> str:
    lines = [line.strip() for line in error.strip().splitlines()] or [""]
    # A syntax error comes after its place.
    if lines[0].startswith('File "'):
        return f"{lines[-1]} ({lines[0]})"
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0]


def _line(failure: Failure, started: float) -> str:
    end = failure.end
    if failure.stopped:
        end = f"stopped by npurun, {end}"
    line = f"rank {failure.rank}: {end}, {failure.time - started:.1f} s after the start"
    if failure.error:
        line += f": {failure.error}"
    return line
