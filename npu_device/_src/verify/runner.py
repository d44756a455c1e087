"""Runs a script as all processes of ``npurun verify``: ``python -m`` this module, with SETTINGS script argument ….

Each process wraps Keras and TensorFlow before the script goes on.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS, RECORDS_SECONDS
from npu_device._src.comparison import compare
from npu_device._src.verify.forking import (
    INDIVISIBLE,
    SEED,
    ForkingProcess,
    are_done,
    next_end,
    output_of,
    problem_text,
    report_problem,
    run_script,
)
from npu_device._src.verify.plan import DONE, FAILED, PlannedProcess

_MOST_TIMES_SLOWER = 10  # ranks than the single process, before they are ended


class _VerifiedProcess(ForkingProcess):
    """A process of ``npurun verify``."""

    def __init__(self, plan: PlannedProcess, sizes: Sequence[int], script: str) -> None:
        self._runs = plan.runs(sizes)
        self._single_seconds = 0.0
        super().__init__(plan, script)

    def runs(self) -> Iterator[Sequence[PlannedProcess]]:
        return iter(self._runs)

    def wait(self, running: dict[int, PlannedProcess]) -> None:
        began = time.monotonic()
        # The run after the single process has the number of ranks that was asked for.
        _wait(running, self._runs[1], self._single_seconds)
        # Measured once, for the first run: that of one process and its twin.
        self._single_seconds = self._single_seconds or time.monotonic() - began

    def recorder(self) -> Any:
        from npu_device._src.verify.step_recorder import StepRecorder

        return StepRecorder(self.plan, SEED)


def _wait(
    running: dict[int, PlannedProcess], requested: Sequence[PlannedProcess], single_seconds: float
) -> None:
    """Wait until each process of a run has recorded its last step or ended.

    Ranks may take a multiple of the seconds of the single process; 0 for no limit. Only a number of ranks above the
    requested one may fail to divide the batch.
    """
    deadline = math.inf
    if single_seconds:
        deadline = time.monotonic() + max(_MOST_TIMES_SLOWER * single_seconds, RECORDS_SECONDS)
    while not are_done(running.values()):
        is_late = time.monotonic() > deadline
        if is_late and all(compare.exists(process.folder) for process in running.values()):
            break
        end = next_end(running)
        if end is None:
            continue
        process, code = end
        # By default 3 ranks are tried as well, although 3 doesn't divide every batch.
        is_extra = process.ranks > requested[0].ranks
        if code and is_extra and INDIVISIBLE in output_of(process):
            break
        _take_note_of_end(process, code)
        # A rank that fails leaves the others waiting for it.
        if code:
            deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)


def _take_note_of_end(process: PlannedProcess, code: int) -> None:
    """Keep how a process has ended; end this one if it has left no step."""
    end = "ended before its first step"
    if code:
        end = f"failed with exit code {code}"
    if not (compare.exists(process.folder) and compare.load(process.folder).steps):
        report_problem(process, end)
    if code:
        (process.folder / FAILED).write_text(problem_text(process, end), encoding="utf-8")
    # Other processes go as far as this one, and look for this file to know how far that is.
    (process.folder / DONE).touch()


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and record their steps."""
    settings = json.loads(arguments[0])
    sizes = settings.pop("sizes")
    plan = PlannedProcess(**settings)
    words = arguments[1:]
    run_script(_VerifiedProcess(plan, sizes, words[0]), words)


if __name__ == "__main__":
    main(sys.argv[1:])
