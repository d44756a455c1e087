"""Runs a script as all processes of ``npurun speed``: ``python -m`` this module, with SETTINGS script argument ….

The first round is traced. Then come rounds in which each number of ranks has its turn, so that a machine that becomes
slower for a while is slower for all of them. One process, and the ranks of this host, are forks; ``npurun --hosts``
starts ranks on several hosts, each of which is this module again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS
from npu_device._src.machine.core_sets import core_sets, cpus_of, threads_of_rank
from npu_device._src.machine.topology import read_machine
from npu_device._src.speed import outcome
from npu_device._src.speed.timed_process import (
    TRACED,
    Setup,
    TimedProcess,
    finish,
    keep_report,
    load_times,
)
from npu_device._src.verify.forking import (
    ForkingProcess,
    are_done,
    end_with_problem,
    next_end,
    output_of,
    run_script,
)
from npu_device._src.verify.plan import DONE, LOG, START, PlannedProcess
from npu_device._src.wording import INDIVISIBLE, counted

_MODULE = "npu_device._src.speed.measured_runs"
_NO_TIME = "no time (see --minutes)"


class _SpeedProcess(ForkingProcess):
    """A process of ``npurun speed``."""

    current: TimedProcess

    def __init__(self, start: TimedProcess, words: Sequence[str]) -> None:
        # The variables as npurun --hosts has to find them, whatever the script does to them.
        self._variables = dict(os.environ)
        self._folder = os.getcwd()
        self._words = words
        self._setups = [Setup(*setup) for setup in start.setups]
        self._left_out: dict[str, str] = {}  # reasons, by the label of a setup
        self._runs: dict[Setup, list[outcome.Run]] = {}
        self._processes: list[TimedProcess] = []  # processes of the latest run
        self._deadline = time.monotonic() + start.seconds
        self._seconds_of_run: dict[Setup, float] = {}
        # The standard error of npurun: this process soon has a file instead, as its script prints what it likes.
        self._console = os.dup(2)  # a copy of the console, for progress
        super().__init__(start)

    def stages(self) -> Iterator[Sequence[PlannedProcess]]:
        # One process is first: it tells how long a run takes.
        for setup in list(self._setups):
            if setup == Setup(1) or self._has_time_for([setup]):
                yield from self._run(setup, TRACED)
            else:
                self._leave_out(setup, _NO_TIME)
        if self._measured.problem:
            return
        least = self.current.rounds
        minutes = least * sum(self._seconds_of_run.values()) / 60
        self._say(f"{counted(least, 'round')}: about {minutes:.1f} min")
        for round_number in itertools.count(1):
            # Setups are left out from the end, since too few rounds decide nothing.
            while len(self._setups) > 2 and not self._has_time_for(
                self._setups * (least + 1 - round_number)
            ):
                self._leave_out(self._setups[-1], _NO_TIME)
            is_settled = all(speedup.is_settled for speedup in self._measured.speedups[1:])
            if not self._has_time_for(self._setups) or (round_number > least and is_settled):
                return
            # A run may leave its number of ranks out.
            for setup in list(self._setups):
                yield from self._run(setup, str(round_number))

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

    def _run(self, setup: Setup, round_name: str) -> Iterator[Sequence[PlannedProcess]]:
        """Yield the processes of a run, unless npurun starts them."""
        self._setup = setup
        self._begin = time.monotonic()
        self._ticks = _ticks_of_others()
        self._processes = self.current.run_of(setup, round_name)
        temporary = Path(self._variables["TMPDIR"])
        kept_paths = set(temporary.iterdir())
        if self._processes[0].is_on_hosts:
            self._run_on_hosts()
        else:
            yield self._processes
        # Removed, since each run would leave its checkpoints and temporary files.
        for path in (self._processes[0].files, *set(temporary.iterdir()) - kept_paths):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _run_on_hosts(self) -> None:
        """Let npurun start the ranks, and end them when all have printed their times."""
        first = self._processes[0]
        first.folder.mkdir(parents=True)
        options = [*first.launch_words(self._setup), "--grace", "1", "-m", _MODULE]
        npurun = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "npu_device.launch",
                *options,
                json.dumps(vars(first)),
                *self._words,
            ],
            env=self._variables,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert npurun.stdout is not None
        limit = threading.Timer(
            self._deadline - time.monotonic(), npurun.send_signal, [signal.SIGINT]
        )
        limit.start()
        with (first.folder / LOG).open("w") as log:
            for line in npurun.stdout:
                if not keep_report(first, line):
                    log.write(line)
                elif are_done(self._processes):
                    # A rank that is done goes on training, so that the others aren't disturbed.
                    npurun.send_signal(signal.SIGINT)
        limit.cancel()
        code = npurun.wait()
        if are_done(self._processes) or time.monotonic() > self._deadline:
            self._keep_run()
        else:
            self._on_early_end(first, code)

    def _has_time_for(self, setups: Sequence[Setup]) -> bool:
        """Return True if runs of these numbers of ranks probably end in time."""
        # The longest run so far is the estimate for a setup that has not run yet.
        longest = max(self._seconds_of_run.values(), default=0.0)
        seconds = sum(self._seconds_of_run.get(setup, longest) for setup in setups)
        return time.monotonic() + seconds < self._deadline

    def _leave_out(self, setup: Setup, reason: str) -> None:
        self._setups.remove(setup)
        self._left_out[setup.label] = reason
        self._conclude()

    def wait(self, running: dict[int, PlannedProcess]) -> None:
        deadline = self._deadline
        # A rank that is done goes on training, so that the others aren't disturbed.
        while not are_done(self._processes) and time.monotonic() < deadline:
            end = next_end(running)
            if end is None:
                continue
            process, code = end
            if code or load_times(process) is None:
                self._on_early_end(process, code)
                return
            # The process has ended after its last step, while the others may still write down theirs.
            (process.folder / DONE).touch()
            deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)
        self._keep_run()

    def _on_early_end(self, process: PlannedProcess, code: int) -> None:
        """Leave out a number of ranks if fewer may work; any other end without times is a problem."""
        reason = ""
        if INDIVISIBLE in output_of(process):
            reason = "they can't divide the batch"
        elif code == -signal.SIGKILL:
            reason = "a rank was killed, as the system does when memory is short"
        if process.ranks > 1 and reason:
            self._leave_out(self._setup, reason)
            return
        end = f"failed with exit code {code}"
        if not code:
            end = (
                f"ended before {process.steps} steps of a Keras optimizer could be timed; the first ones, and all "
                "until its functions are traced, don't count.\nWhat to do: let it train longer, or give fewer --steps"
            )
        end_with_problem(process, end)

    def _keep_run(self) -> None:
        """Take note of the times of the latest run, and tell its speed."""
        first = self._processes[0]
        # CPU time that the run would have had otherwise.
        lost_seconds = (_ticks_of_others() - self._ticks) / os.sysconf("SC_CLK_TCK")
        duration = time.monotonic() - self._begin
        self._seconds_of_run[self._setup] = duration
        run = outcome.run_of(self._processes, max(0.0, lost_seconds / duration))
        if run is None:
            if len(self._seconds_of_run) == 1:
                end_with_problem(
                    first, "made no steps of a Keras optimizer in all the time of --minutes"
                )
            return
        self._runs.setdefault(self._setup, []).append(run)
        self._conclude()
        remaining = max(0.0, self._deadline - time.monotonic())
        self._say(
            f"{first.name}, round {first.round}: {1 / run.seconds:.3g} steps/s; at most {remaining / 60:.0f} min left"
        )

    def _conclude(self) -> None:
        """Keep what the runs so far show, where npurun finds it whenever it ends this process."""
        self._measured = outcome.outcome(self.current, self._runs, self._left_out)
        self._measured.save(Path(self.current.directory))

    def _say(self, text: str) -> None:
        # The console is for progress, while the script's own output goes to a file. It may be closed by now.
        with contextlib.suppress(OSError):
            os.write(self._console, f"npurun speed: {text}\n".encode())

    def recorder(self) -> Any:
        from npu_device._src.speed.step_clock import StepClock

        return StepClock(self.current)


def _ticks_of_others() -> int:
    """Return the time of other programs on the CPUs of this process, less that of idle CPUs."""
    cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name in cpus:
            # The fields are user, nice, system, idle, waiting for disks, interrupts (2), and stolen by other virtual
            # machines.
            times = list(map(int, numbers[:8]))
            ticks += sum(times) - 2 * sum(times[3:5])
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may have ended since it was listed.
        with contextlib.suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            # A session has the number of its first process. Times of children that have ended are there, too.
            if int(fields[3]) == os.getsid(0):
                ticks -= sum(map(int, fields[11:15]))
    return ticks


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and time their steps."""
    settings, *words = arguments
    start = TimedProcess(**json.loads(settings))
    if start.run != START:
        start = start.here()
    run_script(_SpeedProcess(start, words), words)
    # A script on a host may end before its files are sent, or send them twice; forks leave theirs anyway.
    if load_times(start) is not None:
        finish(start)


if __name__ == "__main__":
    main(sys.argv[1:])
