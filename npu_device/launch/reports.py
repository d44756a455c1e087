"""What the npurun of a host tells the npurun that was started by hand: lines of its standard error, which the latter
takes out of the output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from npu_device.launch.output import Console

RUNNING = "running"  # npurun runs on the host, alone
ATTEMPT = "attempt"  # an attempt begins there
PREEMPTED = "preempted"  # the host got the signal that takes it away
WRITING = "writing"  # the host writes a copy in memory to the disk before it ends
LEAVING = "leaving"  # the host ends, and the job continues
OVER = "over"  # the host ends, and so does the job


@dataclass(frozen=True)
class Report:
    state: str
    code: int = 0  # exit code, of LEAVING and OVER
    count: int = 0  # number of the attempt, from 0
    nodes: Sequence[int] = ()  # nodes that take part in the attempt
    is_cause: bool = False  # of OVER: a rank has failed by itself, not because of another one


@dataclass
class Reporter:
    """Reports to the npurun that was started by hand, and has what that one told. Without a name, it is this one."""

    # Name of this host's npurun, with which each report begins.
    name: str = ""
    console: Console = field(default_factory=Console)
    count: int = 0  # number of the next attempt
    nodes: Sequence[int] = ()  # nodes of the newest attempt; empty before any
    is_preempted: bool = False
    is_cause: bool = False  # a rank of this host has failed by itself

    def tell(self, state: str, **fields: Any) -> None:
        """Report a state, with fields of ``Report``."""
        self.is_preempted = self.is_preempted or state == PREEMPTED
        if self.name:
            report = Report(state, is_cause=self.is_cause, **fields)
            # The console keeps the line whole among the lines of the ranks.
            self.console.write(2, f"{self.name} {json.dumps(asdict(report))}\n".encode())
