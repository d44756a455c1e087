"""Find out why an attempt failed, at which place in the script, and whether every other attempt would fail, too.

``failures`` finds the rank that failed first; ``ledger`` decides what follows.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from npu_device._src.cluster.tracebacks import is_users
from npu_device.launch.failures import Failure

_CANNOT_IMPORT = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")
# Python's own messages about a missing script or module.
_NO_SCRIPT = re.compile(
    r"can't open file |: No module named |: Error while finding module specification|can't find '__main__"
)
_WRONG_USAGE = 2
_PYTHON_FAILED = 1
# Sent from outside, by a person, the system or a scheduler: where the script was then means nothing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Errors that a rank raises, wherever it is, when another rank is lost.
_LOST_PEER = ("PeerError", "RendezvousError", "UnavailableError", "DeadlineExceededError", "AbortedError")


@dataclass(frozen=True)
class Cause:
    """The failure of a rank, as the nodes tell each other.

    Attributes:
        rank: number of the rank.
        host: name of its host.
        what: how it ended, and its error.
        time: seconds since the epoch.
        is_consequence: it follows from another failure.
        place: where in the script it failed; None if the script isn't to blame.
        hopeless: why a restart would end in the same way; None if it might not.
    """

    rank: int
    host: str
    what: str
    time: float
    is_consequence: bool
    place: str | None
    hopeless: str | None

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
        hopeless=_hopeless(failure),
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


def _hopeless(failure: Failure) -> str | None:
    if failure.opened or failure.is_consequence:
        return None
    error = failure.error
    if failure.exit.status == _PYTHON_FAILED and _kind(error) in _CANNOT_IMPORT:
        return f"the script can't be imported: {error}"
    if failure.exit.status in (_PYTHON_FAILED, _WRONG_USAGE):
        said = [line for line in failure.stderr[-2:] if _NO_SCRIPT.search(line)]
        if said and not error:
            return f"the script isn't there: {said[-1]}"
    if failure.exit.status == _WRONG_USAGE:
        return "the script ended with exit code 2 (wrong usage) before it opened npu_device"
    return None


def _kind(error: str) -> str:
    """Return the type of an error without its module."""
    return error.partition(":")[0].rpartition(".")[2].strip()
