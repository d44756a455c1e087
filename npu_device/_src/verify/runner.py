"""Runs a script as all processes of ``npurun verify``: ``python -m`` this module, with SETTINGS script argument ….

Each process wraps Keras and TensorFlow before the script goes on.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS, RECORDS_SECONDS
from npu_device._src.comparison.compare import load
from npu_device._src.verify.forking import (
    ForkingProcess,
    are_done,
    end_with_problem,
    next_end,
    output_of,
    problem_text,
    run_script,
)
from npu_device._src.verify.plan import DONE, FAILED, PlannedProcess
from npu_device._src.wording import INDIVISIBLE

_MOST_TIMES_SLOWER = 10  # ranks than the single process, before they are ended


class _VerifiedProcess(ForkingProcess):
    """A process of ``npurun verify``."""

    def __init__(self, start: PlannedProcess) -> None:
        self._requested_ranks = start.sizes[0]
        self._single_seconds = 0.0
        super().__init__(start)

    def stages(self) -> Iterable[Sequence[PlannedProcess]]:
        return self.current.stages()

    def wait(self, running: dict[int, PlannedProcess]) -> None:
        """Wait until each process of a stage has recorded its last step or ended."""
        began = time.monotonic()
        deadline = math.inf
        # Ranks may take a multiple of the seconds of the single process.
        if self._single_seconds:
            deadline = began + max(_MOST_TIMES_SLOWER * self._single_seconds, RECORDS_SECONDS)
        while not are_done(running.values()):
            if time.monotonic() > deadline and self._give_up(running, deadline - began):
                break
            end = next_end(running)
            if end is None:
                continue
            process, code = end
            how = "ended before its first step"
            if code:
                how = f"failed with exit code {code}"
            # By default 3 ranks are tried as well, although 3 doesn't divide every batch.
            is_extra = process.ranks > self._requested_ranks
            if code and is_extra and INDIVISIBLE in output_of(process):
                break
            if not load(process.folder).steps:
                if not is_extra:
                    end_with_problem(process, how)
                # Ranks for which nobody has asked must not hide what the others show.
                _keep_failure(process, how)
                break
            if code:
                _keep_failure(process, how)
                # A rank that fails leaves the others waiting for it.
                deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)
            # Other processes go as far as this process, and wait for this file to know how far that is.
            (process.folder / DONE).touch()
        # Measured in the first stage, which has no ranks.
        self._single_seconds = self._single_seconds or time.monotonic() - began

    def _give_up(self, running: dict[int, PlannedProcess], seconds: float) -> bool:
        """Keep what is missing of processes that take too long; return False to wait for them nevertheless."""
        late = [process for process in running.values() if not (process.folder / DONE).exists()]
        without_steps = [process for process in late if not load(process.folder).steps]
        ranks = max(process.ranks for process in running.values())
        if without_steps:
            # Ranks for which the user has asked are waited for until ``npurun verify`` ends everything.
            is_extra = ranks > self._requested_ranks
            if is_extra:
                _keep_failure(without_steps[0], f"made no step within {seconds:.0f} s")
            return is_extra
        for process in late:
            if ranks == self._requested_ranks:
                _keep_failure(process, f"made no further step within {seconds:.0f} s")
            # Among them is the single process, if the perturbed one has failed: ranks go as far, once it has this file.
            (process.folder / DONE).touch()
        return True

    def recorder(self) -> Any:
        from npu_device._src.verify.step_recorder import StepRecorder

        return StepRecorder(self.current)


def _keep_failure(process: PlannedProcess, how: str) -> None:
    (process.folder / FAILED).write_text(problem_text(process, how), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and record their steps."""
    settings, *words = arguments
    run_script(_VerifiedProcess(PlannedProcess(**json.loads(settings))), words)


if __name__ == "__main__":
    main(sys.argv[1:])
