"""Which rank failed first.

The process that *ends* first need not be the one: a rank that raises takes its time to shut down, while another one
dies of the consequence. So each rank that uses npu_device leaves a record in the moment it fails
(``npu_device.cluster.health`` writes it); for the others the time of their end counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from npu_device.launch.processes import Exit


@dataclass(frozen=True)
class Record:
    """What a rank wrote about its own failure.

    Attributes:
        time: seconds since the epoch.
        error: the exception's type and message.
        traceback: the whole traceback.
        secondary: the error is the consequence of another rank's failure.
    """

    time: float
    error: str
    traceback: str
    secondary: bool


def read_record(path: str) -> Record | None:
    """The record in a file; None when the rank left none, or one that can't be used."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return Record(float(found["time"]), str(found["error"]), str(found["traceback"]), bool(found["secondary"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Failure:
    """A rank that ended with anything but exit code 0.

    Attributes:
        rank: number of the rank.
        exit: how its process ended.
        record: what the rank wrote itself, or None.
        stopped: the process ended after the launcher had asked it to.
        stderr: the last lines of its stderr.
    """

    rank: int
    exit: Exit
    record: Record | None
    stopped: bool
    stderr: tuple[str, ...] = ()

    @property
    def time(self) -> float:
        """When it failed, in seconds since the epoch."""
        return self.record.time if self.record else self.exit.time

    @property
    def is_consequence(self) -> bool:
        """True when another rank's failure, or the launcher, made this rank fail."""
        return self.record.secondary if self.record else self.stopped

    @property
    def code(self) -> int:
        """The exit code to report: 1, an exception's, for a rank that had raised before the launcher killed it."""
        return 1 if self.record and self.stopped else self.exit.code


def in_order(failures: list[Failure]) -> list[Failure]:
    """Failures in time: first the causes, then the errors that follow from them, then the ranks that were stopped."""

    def key(failure: Failure) -> tuple[bool, bool, float]:
        consequence = failure.is_consequence
        return consequence, consequence and failure.record is None, failure.time

    return sorted(failures, key=key)
