"""Runs a script as all processes of ``npurun speed``: ``python -m`` this module, with SETTINGS script argument ….

The first round is traced. Then come rounds in which each number of ranks has its turn, so that a machine that becomes
slower for a while is slower for all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS, SWEEP_SECONDS
from npu_device._src.machine.core_sets import core_sets, cpus_of
from npu_device._src.machine.topology import read_machine
from npu_device._src.speed.outcome import LEAST_ROUNDS, outcome
from npu_device._src.speed.timed_process import (
    LEFT_OUT,
    TRACED,
    Setup,
    TimedProcess,
    load_times,
    save_memory,
)
from npu_device._src.verify.forking import (
    INDIVISIBLE,
    ForkingProcess,
    end_all,
    output_of,
    report_problem,
    run_script,
)
from npu_device._src.verify.plan import DONE, PlannedProcess

_NO_TIME = "no time (see --minutes)"


class _SpeedProcess(ForkingProcess):
    """A process of ``npurun speed``.

    Args:
        setups: one process first.
        seconds: in which all runs have to end.
        rounds: at least; with fewer than ``LEAST_ROUNDS``, nothing is decided.
    """

    def __init__(
        self,
        start: TimedProcess,
        setups: Sequence[Setup],
        seconds: float,
        rounds: int,
        script: str,
    ) -> None:
        self._rounds = rounds
        self._start = start
        self._setups = list(setups)
        self._deadline = time.monotonic() + seconds
        self._seconds_of_run: dict[Setup, float] = {}
        self._left_out: dict[str, str] = {}
        # The standard error of npurun: this process soon has a file instead, as its script prints what it likes.
        self._console = os.dup(2)  # for progress
        super().__init__(start, script)

    def runs(self) -> Iterator[Sequence[PlannedProcess]]:
        # One process is first: it tells how long a run takes.
        for setup in list(self._setups):
            if self._has_time_for([setup]):
                yield self._run(setup, TRACED)
            else:
                self._leave_out(setup, _NO_TIME)
        for number in range(1, 1000):
            # What has too few rounds would not be decided.
            while len(self._setups) > 2 and not self._has_time_for(
                self._setups * (self._rounds + 1 - number)
            ):
                self._leave_out(self._setups[-1], _NO_TIME)
            if not self._has_time_for(self._setups) or self._is_over(number - 1):
                return
            # A run may leave its number of ranks out.
            for setup in list(self._setups):
                yield self._run(setup, str(number))

    def become(self, process: PlannedProcess) -> None:
        super().become(process)
        assert isinstance(process, TimedProcess)
        # In this process, TensorFlow is imported, but has made no threads yet.
        machine = read_machine()
        sets = core_sets(machine, process.ranks, process.binding)
        if sets:
            os.sched_setaffinity(0, cpus_of(sets[process.rank]))
            environment.NPU_DEVICE_CORES.set(str(len(sets[process.rank])))

    def _run(self, setup: Setup, round_name: str) -> Sequence[PlannedProcess]:
        self._begin = time.monotonic()
        return self._start.run_of(setup, round_name)

    def _has_time_for(self, setups: Sequence[Setup]) -> bool:
        """Return True if runs of these numbers of ranks probably end in time."""
        # An estimate for a setup that has not run yet.
        longest = max(self._seconds_of_run.values(), default=0.0)
        seconds = sum(self._seconds_of_run.get(setup, longest) for setup in setups)
        return time.monotonic() + seconds < self._deadline

    def _leave_out(self, setup: Setup, reason: str) -> None:
        self._setups.remove(setup)
        self._left_out[setup.label] = reason
        Path(self._start.directory, LEFT_OUT).write_text(json.dumps(self._left_out))

    def _is_over(self, rounds: int) -> bool:
        """Return True if these rounds are enough."""
        if rounds < self._rounds:
            return False
        return self._rounds < LEAST_ROUNDS or all(
            speedup.verdict for speedup in outcome(self._start, self._setups).speedups[1:]
        )

    def wait(self, running: dict[int, PlannedProcess]) -> None:
        processes = list(running.values())
        deadline = self._deadline
        # A rank that is done goes on training, so that the others aren't disturbed.
        while not all((process.folder / DONE).exists() for process in processes):
            time.sleep(SWEEP_SECONDS)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                process = running.pop(pid)
                if status or load_times(process) is None:
                    end_all(list(running))
                    self._look_at_end(process, status)
                    return
                # It has ended after its last step, while the others may still write down theirs.
                (process.folder / DONE).touch()
                deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)
            if time.monotonic() > deadline:
                break
        save_memory(processes[0], sum(map(_memory, running)))
        end_all(list(running))
        self._tell(processes)

    def _look_at_end(self, process: PlannedProcess, status: int) -> None:
        """Leave out a number of ranks that can't divide the batch; any other end without times is a problem."""
        # The script decides on its batch, and may work with another number of ranks.
        assert isinstance(process, TimedProcess)
        if process.ranks > 1 and INDIVISIBLE in output_of(process):
            self._leave_out(process.setup, "they can't divide the batch")
            return
        end = f"ended before it had made {process.steps} steps after its first ones"
        if status:
            end = f"failed with exit code {os.waitstatus_to_exitcode(status)}"
        report_problem(process, end)

    def _tell(self, processes: Sequence[PlannedProcess]) -> None:
        first = processes[0]
        assert isinstance(first, TimedProcess)
        self._seconds_of_run[first.setup] = time.monotonic() - self._begin
        # Each run would leave its checkpoints.
        shutil.rmtree(first.files, ignore_errors=True)
        times = load_times(first)
        if times is None:
            if len(self._seconds_of_run) == 1:
                report_problem(
                    first, "made no steps of a Keras optimizer in all the time of --minutes"
                )
            return
        # Progress goes to the console while the script's own output goes to a file.
        left = max(0.0, self._deadline - time.monotonic())
        text = f"{first.setup.label} rank(s), round {first.round}: {times.steps / times.seconds:.3g} steps/s"
        os.write(
            self._console, f"npurun speed: {text}; at most {left / 60:.0f} min left\n".encode()
        )

    def recorder(self) -> Any:
        from npu_device._src.speed.step_clock import StepClock

        assert isinstance(self.plan, TimedProcess)
        return StepClock(self.plan)


def _memory(pid: int) -> int:
    """Return the bytes of memory of a process, its part of what it shares with others."""
    # Forks of one process share most pages of TensorFlow, which resident sizes would count twice.
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and time their steps."""
    settings = json.loads(arguments[0])
    setups = [Setup(*setup) for setup in settings.pop("setups")]
    limit = settings.pop("limit")
    rounds = settings.pop("rounds")
    start = TimedProcess(**settings)
    words = arguments[1:]
    run_script(_SpeedProcess(start, setups, limit, rounds, words[0]), words)


if __name__ == "__main__":
    main(sys.argv[1:])
