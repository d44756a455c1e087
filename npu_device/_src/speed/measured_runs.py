"""Runs a script as all processes of ``npurun speed``: ``python -m`` this module, with SETTINGS script argument ….

The first round is traced. Then come rounds in which each number of ranks has its turn, so that a machine that becomes
slower for a while is slower for all of them. One process, and the ranks of this host, are forks; ``npurun --hosts``
starts those of several hosts, each of which is this module again.
"""

from __future__ import annotations

import contextlib
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
from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS, SWEEP_SECONDS
from npu_device._src.machine.core_sets import core_sets, cpus_of, threads_of_rank
from npu_device._src.machine.topology import read_machine
from npu_device._src.speed.outcome import LEAST_ROUNDS, outcome
from npu_device._src.speed.timed_process import (
    TRACED,
    Setup,
    TimedProcess,
    finish,
    leave_out,
    load_times,
    save_lost_cores,
    take_report,
)
from npu_device._src.verify.forking import (
    INDIVISIBLE,
    ForkingProcess,
    end_all,
    output_of,
    report_problem,
    run_script,
)
from npu_device._src.verify.plan import DONE, LOG, START, PlannedProcess
from npu_device._src.wording import counted

_MODULE = "npu_device._src.speed.measured_runs"
_NO_TIME = "no time (see --minutes)"


class _SpeedProcess(ForkingProcess):
    """A process of ``npurun speed``; the first of ``setups`` is one process."""

    def __init__(self, start: TimedProcess, setups: Sequence[Setup], words: Sequence[str]) -> None:
        self._rounds = start.rounds
        self._start = start
        # The variables as npurun --hosts has to find them, whatever the script does to them.
        self._variables = dict(os.environ)
        self._folder = os.getcwd()
        self._words = words
        self._setups = list(setups)
        self._deadline = time.monotonic() + start.seconds
        self._seconds_of_run: dict[Setup, float] = {}
        # The standard error of npurun: this process soon has a file instead, as its script prints what it likes.
        self._console = os.dup(2)  # a copy of the console, for progress
        super().__init__(start, words[0])

    def runs(self) -> Iterator[Sequence[PlannedProcess]]:
        # One process is first: it tells how long a run takes.
        for setup in list(self._setups):
            if self._has_time_for([setup]):
                yield from self._run(setup, TRACED)
            else:
                self._leave_out(setup, _NO_TIME)
        if outcome(self._start, self._setups).problem:
            return
        self._tell_estimate()
        for number in range(1, 1000):
            # Setups are left out from the end, since too few rounds decide nothing.
            while len(self._setups) > 2 and not self._has_time_for(
                self._setups * (self._rounds + 1 - number)
            ):
                self._leave_out(self._setups[-1], _NO_TIME)
            if not self._has_time_for(self._setups) or self._is_over(number - 1):
                return
            # A run may leave its number of ranks out.
            for setup in list(self._setups):
                yield from self._run(setup, str(number))

    def redirect_output(self, process: PlannedProcess) -> None:
        assert isinstance(process, TimedProcess)
        # On other hosts, npurun takes what ranks print.
        if not process.is_on_hosts:
            super().redirect_output(process)

    def become(self, process: PlannedProcess) -> None:
        super().become(process)
        assert isinstance(process, TimedProcess)
        if process.is_on_hosts:
            # npurun has bound a rank on hosts already.
            return
        # TensorFlow is imported in this process, but has made no threads yet.
        machine = read_machine()
        sets = core_sets(machine, process.ranks, process.binding)
        if sets:
            os.sched_setaffinity(0, cpus_of(sets[process.rank]))
        threads = threads_of_rank(machine, process.ranks, sets)
        # Limited as npurun does it, also where a quota is smaller than the host.
        if process.ranks > 1 and threads is not None:
            environment.NPU_DEVICE_CORES.set(str(threads))

    def _run(self, setup: Setup, round_name: str) -> Iterator[Sequence[PlannedProcess]]:
        """Yield the processes of a run, unless npurun starts them."""
        self._begin = time.monotonic()
        self._lost_cores = _LostCores()
        processes = self._start.run_of(setup, round_name)
        if processes[0].is_on_hosts:
            self._run_on_hosts(processes)
        else:
            yield processes

    def _run_on_hosts(self, processes: Sequence[TimedProcess]) -> None:
        """Let npurun start the ranks, and end them when all have printed their times."""
        first = processes[0]
        first.folder.mkdir(parents=True)
        settings = json.dumps({**vars(first), "setups": ()})
        options = [*first.launch_words(first.ranks, first.binding), *["--horovod"] * first.horovod]
        options += ["--grace", "1", "-m", _MODULE, settings]
        npurun = subprocess.Popen(
            [sys.executable, "-m", "npu_device.launch", *options, *self._words],
            env=self._variables,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
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
        reports = 0
        with (first.folder / LOG).open("w") as log:
            for line in npurun.stdout:
                if not take_report(first, line):
                    log.write(line)
                    continue
                reports += 1
                # A rank that is done goes on training, so that the others aren't disturbed.
                if reports == len(processes):
                    npurun.send_signal(signal.SIGINT)
        limit.cancel()
        code = npurun.wait()
        if reports < len(processes) and time.monotonic() < self._deadline:
            self._look_at_end(first, code)
        else:
            self._tell(processes)

    def _has_time_for(self, setups: Sequence[Setup]) -> bool:
        """Return True if runs of these numbers of ranks probably end in time."""
        # The longest run so far is the estimate for a setup that has not run yet.
        longest = max(self._seconds_of_run.values(), default=0.0)
        seconds = sum(self._seconds_of_run.get(setup, longest) for setup in setups)
        return time.monotonic() + seconds < self._deadline

    def _leave_out(self, setup: Setup, reason: str) -> None:
        self._setups.remove(setup)
        leave_out(self._start, setup, reason)

    def _is_over(self, rounds: int) -> bool:
        """Return True if these rounds are enough."""
        if rounds < self._rounds:
            return False
        # Further rounds don't help against other programs.
        return self._rounds < LEAST_ROUNDS or not any(
            speedup.low <= 1 <= speedup.high
            for speedup in outcome(self._start, self._setups).speedups[1:]
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
                    self._look_at_end(process, os.waitstatus_to_exitcode(status))
                    return
                # The process has ended after its last step, while the others may still write down theirs.
                (process.folder / DONE).touch()
                deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)
            if time.monotonic() > deadline:
                break
        save_lost_cores(processes[0], self._lost_cores.mean())
        end_all(list(running))
        self._tell(processes)

    def _look_at_end(self, process: PlannedProcess, code: int) -> None:
        """Leave out a number of ranks that can't divide the batch; any other end without times is a problem."""
        # The script decides on its batch, and may work with another number of ranks.
        assert isinstance(process, TimedProcess)
        if process.ranks > 1 and INDIVISIBLE in output_of(process):
            self._leave_out(process.setup, "they can't divide the batch")
            return
        end = f"failed with exit code {code}"
        if not code:
            end = (
                f"ended before {process.steps} steps of a Keras optimizer could be timed; the first ones, and all "
                "until its functions are traced, don't count.\nWhat to do: let it train longer, or give fewer --steps"
            )
        report_problem(process, end)

    def _tell(self, processes: Sequence[PlannedProcess]) -> None:
        first = processes[0]
        assert isinstance(first, TimedProcess)
        self._seconds_of_run[first.setup] = time.monotonic() - self._begin
        # Removed, since each run would leave its checkpoints.
        shutil.rmtree(first.files, ignore_errors=True)
        times = load_times(first)
        if times is None:
            if len(self._seconds_of_run) == 1:
                report_problem(
                    first, "made no steps of a Keras optimizer in all the time of --minutes"
                )
            return
        left = max(0.0, self._deadline - time.monotonic())
        self._say(
            f"{first.name}, round {first.round}: {times.steps / times.seconds:.3g} steps/s; at most {left / 60:.0f} "
            "min left"
        )

    def _tell_estimate(self) -> None:
        """Print how long the rounds take, now that each number of ranks has run once."""
        seconds = self._rounds * sum(self._seconds_of_run.values())
        self._say(f"{counted(self._rounds, 'round')}: about {seconds / 60:.1f} min")

    def _say(self, text: str) -> None:
        # The console is for progress, while the script's own output goes to a file.
        os.write(self._console, f"npurun speed: {text}\n".encode())

    def recorder(self) -> Any:
        from npu_device._src.speed.step_clock import StepClock

        assert isinstance(self.plan, TimedProcess)
        return StepClock(self.plan)


class _LostCores:
    """The CPU time that other programs take from the runs, from now on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._ticks = self._read()

    def mean(self) -> float:
        """Return how many cores the runs would have had otherwise."""
        ticks = max(0, self._read() - self._ticks)
        return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self._begin)

    def _read(self) -> int:
        """Return the time of other programs on the CPUs of this process, less that of idle CPUs."""
        cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        ticks = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name in cpus:
                # The fields are user, nice, system, idle, waiting for disks, interrupts (2), and stolen by other
                # virtual machines.
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
    settings = json.loads(arguments[0])
    setups = [Setup(*setup) for setup in settings.pop("setups")]
    start = TimedProcess(**settings)
    if start.run != START:
        start = start.here()
    words = arguments[1:]
    run_script(_SpeedProcess(start, setups, words), words)
    # A script on a host may end before its files are sent; forks leave theirs anyway.
    if load_times(start) is not None and not (start.folder / DONE).exists():
        finish(start)


if __name__ == "__main__":
    main(sys.argv[1:])
