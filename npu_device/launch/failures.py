"""Find the rank that failed first.

The process that *ends* first need not be the one: a rank that raises takes a while to shut down, and another one may
die of the consequences meanwhile. Each rank that uses npu_device therefore writes a record at the moment it fails
(``cluster.health`` writes it). For other programs, the time of their end counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from npu_device.launch.processes import Exit


@dataclass(frozen=True)
class Record:
    """A rank's own record of its failure.

    Attributes:
        time: seconds since the epoch.
        error: the exception's type and message.
        traceback: the whole traceback.
        secondary: the error is a consequence of another rank's failure.
    """

    time: float
    error: str
    traceback: str
    secondary: bool


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
    """A rank that ended with any exit code except 0.

    Attributes:
        rank: number of the rank.
        exit: how its process ended.
        record: the rank's own record, or None.
        stopped: the process ended after the launcher asked it to.
        stderr: the last lines of its stderr.
        opened: the rank had opened npu_device.
    """

    rank: int
    exit: Exit
    record: Record | None
    stopped: bool
    stderr: tuple[str, ...] = ()
    opened: bool = False

    @property
    def time(self) -> float:
        """Return the time of the failure, in seconds since the epoch."""
        return self.record.time if self.record else self.exit.time

    @property
    def is_consequence(self) -> bool:
        """Return True if another rank's failure, or the launcher, made this rank fail."""
        return self.record.secondary if self.record else self.stopped

    @property
    def code(self) -> int:
        """Return the exit code to report: 1, an exception's, for a rank that raised before the launcher killed it."""
        return 1 if self.record and self.stopped else self.exit.code


def in_order(failures: list[Failure]) -> list[Failure]:
    """Return failures in order: first causes, then the errors that follow from them, then ranks that were stopped."""

    def key(failure: Failure) -> tuple[bool, bool, float]:
        consequence = failure.is_consequence
        return consequence, consequence and failure.record is None, failure.time

    return sorted(failures, key=key)
