"""The launcher's report at the end of a failed job: the failed ranks, then the first failure with its traceback."""

from __future__ import annotations

import re

from npu_device.launch.failures import Failure

_LAST_LINES = 20
_HEADER = re.compile(r"^[\s+|]*(Exception Group )?Traceback \(most recent call last\):")
_CHAIN = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")


def summary(failures: list[Failure], world_size: int, nnodes: int, host: str, started: float) -> str:
    """Return one line per failed rank, with the first failure last.

    Args:
        failures: in the order of ``failures.in_order``, at least one.
        world_size: number of ranks in the job.
        nnodes: number of nodes in the job.
        host: name of this host.
        started: start of the launch, in seconds since the epoch.
    """
    first, *others = failures
    lines = []
    if others:
        lines.append(f"{len(failures)} of {world_size} ranks ended with an error on host {host}:")
        lines += [f"  {_line(failure, started)}" for failure in reversed(others)]
    if first.is_consequence and nnodes > 1:
        lines.append("a failure on another node has caused this: look at npurun's output on the other nodes.")
    lines.append(f"the first failure on host {host}: {_line(first, started)}")
    return "\n".join(lines)


def evidence(failure: Failure) -> str:
    """Return a failure's traceback: from the rank's own record, else from its stderr, else its last lines."""
    if failure.record and failure.record.traceback:
        return failure.record.traceback.rstrip() + "\n"
    return "".join(line + "\n" for line in excerpt(list(failure.stderr)))


def _line(failure: Failure, started: float) -> str:
    how = f"stopped by npurun, {failure.exit}" if failure.stopped else str(failure.exit)
    line = f"rank {failure.rank}: {how}, {failure.time - started:.1f} s after the start"
    error = failure.record.error.strip().splitlines() if failure.record else []
    return f"{line}: {error[0]}" if error else line


def excerpt(lines: list[str]) -> list[str]:
    """Return the last traceback among the lines of a stderr, with the errors that caused it; else the last lines."""
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return lines[-_LAST_LINES:]
    start = headers.pop()
    while headers and any(_CHAIN.match(line) for line in lines[max(start - 2, 0) : start]):
        start = headers.pop()
    return lines[start:]
