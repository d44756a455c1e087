"""What the processes of ``npurun speed`` have in common that become others by forks."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS
from npu_device._src.machine.core_sets import core_sets, cpus_of, threads_of_rank
from npu_device._src.machine.topology import read_machine
from npu_device._src.speed.timed_process import TimedProcess, load_times
from npu_device._src.verify.forking import ForkingProcess, are_done, next_end
from npu_device._src.verify.plan import DONE, PlannedProcess


class TimedRuns(ForkingProcess):
    """A process that becomes the processes of timed runs, one run after the other."""

    current: TimedProcess

    def __init__(self, start: TimedProcess, script: str) -> None:
        self._deadline = time.monotonic() + start.seconds
        self._processes: list[TimedProcess] = []  # processes of the latest run
        # Rank and exit code of the process that has ended this run before it was timed.
        self._early_end: tuple[int, int] | None = None
        # npurun sets it where files are removed after a run. A rank on another host may have none.
        self._temporary = Path(os.environ.get("TMPDIR", ""))
        super().__init__(start, script)

    def redirect_output(self, process: PlannedProcess) -> None:
        # On other hosts, npurun takes what ranks print.
        if not self.current.is_on_hosts:
            super().redirect_output(process)

    def become(self, process: PlannedProcess) -> None:
        super().become(process)
        current = self.current
        if current.is_on_hosts:
            # npurun has bound a rank on hosts already.
            return
        # TensorFlow is imported in this process, but has made no threads yet.
        machine = read_machine()
        sets = core_sets(machine, current.ranks, current.binding)
        if sets:
            os.sched_setaffinity(0, cpus_of(sets[current.rank]))
        threads = threads_of_rank(machine, current.ranks, sets)
        # Limited as npurun does it, also where a quota is smaller than the host.
        if current.ranks > 1 and threads is not None:
            environment.NPU_DEVICE_CORES.set(str(threads))

    def wait(self, running: dict[int, PlannedProcess]) -> None:
        deadline = self._deadline
        # A rank that is done goes on training, so that the others aren't disturbed.
        while not are_done(self._processes) and time.monotonic() < deadline:
            end = next_end(running)
            if end is None:
                continue
            process, code = end
            if code or load_times(process) is None:
                self._early_end = process.rank, code
                return
            # The process has ended after its last step, while the others may still write down theirs.
            (process.folder / DONE).touch()
            deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)

    def temporary_paths(self) -> set[Path]:
        return set(self._temporary.iterdir())

    def remove_files(self, kept_paths: set[Path]) -> None:
        """Remove what the latest run has written, since each run would leave its checkpoints and temporary files."""
        for path in (self._processes[0].files, *self.temporary_paths() - kept_paths):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def recorder(self) -> Any:
        from npu_device._src.speed.step_clock import StepClock

        return StepClock(self.current)
