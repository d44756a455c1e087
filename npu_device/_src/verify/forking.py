"""One process that begins a script, and becomes the processes of all runs by forks.

It runs the script as ``python`` would until TensorFlow is imported, which is most of a script's start, and has started
no threads yet, which a fork would lose. There it becomes the others, one stage after the other. Each goes on by itself,
as a single process or with the variables of a rank. Variables that the script sets before (``TF_USE_LEGACY_KERAS``)
count. A script that asks for its rank earlier is forked when it asks, unless it lists all variables.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from npu_device._src.cluster.time_limits import SWEEP_SECONDS
from npu_device._src.cluster.tracebacks import parse, without_libraries
from npu_device._src.replicate.after_import import AfterImport
from npu_device._src.replicate.main_program import run_main
from npu_device._src.replicate.wrapped_models import Models
from npu_device._src.threads import end_with_parent
from npu_device._src.verify import file_shadow
from npu_device._src.verify.plan import DONE, LOG, PROBLEM, SEED, START, PlannedProcess

_TAIL_LINES = 25
_MISSING = re.compile("No such file or directory|No files matched pattern")
_WORD = re.compile(r"[^\s'\";,]+")


class ForkingProcess(ABC):
    """This process, which becomes the processes of all runs. Its output and its files are redirected at once.

    Attributes:
        current: what this process is now.
    """

    def __init__(self, start: PlannedProcess) -> None:
        self._recorder: Any = None
        self._models = Models(None)
        self._redirection = file_shadow.Redirection(start.directory)
        self.become(start)
        self._redirection.install()
        self._fork_at_variables()

    @abstractmethod
    def stages(self) -> Iterable[Sequence[PlannedProcess]]:
        """Yield the processes of each stage, which run at the same time; the stage before is over then."""

    @abstractmethod
    def wait(self, running: dict[int, PlannedProcess]) -> None:
        """Wait until a stage, of which these processes are running, is over. They are ended after that."""

    @abstractmethod
    def recorder(self) -> Any:
        """Return what records this process, now that TensorFlow is there, and has ``install(module)``."""

    def imported(self, modules: Sequence[ModuleType]) -> None:
        """Go on as one of the processes, and wrap what the script has imported."""
        # The first process stays in this call, and ends in it.
        self._fork()
        # As in the ranks of npurun --replicate.
        if self.current.replicates and self.current.ranks > 1:
            self._models.imported(modules)
        if self._recorder is None:
            self._recorder = self.recorder()
            self._redirection.install_tensorflow(sys.modules["tensorflow"])
        for module in modules:
            self._recorder.install(module)

    def _fork_at_variables(self) -> None:
        """Fork as soon as the script reads a variable that ranks have."""
        environ_class = type(os.environ)
        self._read_variable = environ_class.__getitem__
        # Made for a run that there isn't, since only the names of the variables count.
        names = replace(self.current, run="names", ranks=2).environment()

        def read(environ: Any, name: str) -> str:
            if name in names:
                self._fork()
            return self._read_variable(environ, name)

        environ_class.__getitem__ = read  # type: ignore[method-assign]

    def _fork(self) -> None:
        """Become the processes of all runs, one stage after the other.

        This returns in each of them, and at once in those that are forked already, but never in the first process.
        """
        if self.current.run != START:
            return
        # The method is put back before the fork, since later reads of the script are no reason to fork.
        type(os.environ).__getitem__ = self._read_variable  # type: ignore[method-assign]
        sys.stdout.flush()
        sys.stderr.flush()
        # Every fork gets this state again, for which Python would set a new one.
        random_state = random.getstate()
        # The ranks of a run start together, since they need each other. Stages follow one another, since they would
        # compete for memory, and since ranks read what the single process has recorded.
        for processes in self.stages():
            # Each run has files of its own, which begin with those that were written before the fork.
            for folder in {process.files for process in processes}:
                self._redirection.copy(folder)
            # Writes the rank table: ranks that wrote it at the same time could meet at different ports.
            processes[0].environment()
            running = {}
            for process in processes:
                pid = os.fork()
                if not pid:
                    end_with_parent()
                    random.setstate(random_state)
                    # The child goes on with the script where it stands.
                    self.become(process)
                    return
                running[pid] = process
            self.wait(running)
            # What they leave is on disk, and a loop of the script may go on for hours.
            for pid in running:
                # Killed, not asked, since the script's handlers must not write more.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        # The script goes on in the other processes, and has only begun here.
        os._exit(0)

    def become(self, process: PlannedProcess) -> None:
        """Go on as a process: with its files, its output and the variables of its job."""
        self.current = process
        process.folder.mkdir(parents=True)
        self.redirect_output(process)
        os.environ.update(process.environment())
        self._redirection.move(process.files)

    def redirect_output(self, process: PlannedProcess) -> None:
        """Let a file take what the script prints."""
        with (process.folder / LOG).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)


def run_script(forking: ForkingProcess, words: Sequence[str]) -> None:
    """Run a script, of which these are path and arguments, in a process that forks."""
    # ``current`` changes in a process that becomes another one.
    start = forking.current
    sys.argv = list(words)
    # Seeded before the script runs, so that all processes draw alike also where it sets no seed.
    random.seed(SEED)
    np.random.seed(SEED)
    # It calls ``imported`` with TensorFlow, with a Keras and with this module, once the script has imported them.
    AfterImport(forking.imported, "npu_device.distribute")
    try:
        run_main(words[0], start.is_module)
    except BaseException:
        # Errors of a child are the script's, and end it as without verify.
        if forking.current.run != START:
            raise
        traceback.print_exc()
    # The first process comes here only if it hasn't forked.
    if forking.current.run == START:
        end_with_problem(start, "ended before its first step")


def are_done(processes: Iterable[PlannedProcess]) -> bool:
    """Return True if processes have all left what is wanted of them."""
    return all((process.folder / DONE).exists() for process in processes)


def next_end(running: dict[int, PlannedProcess]) -> tuple[PlannedProcess, int] | None:
    """Wait for a moment, and remove a process that has ended from the running ones; return it with its exit code."""
    time.sleep(SWEEP_SECONDS)
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid not in running:
        return None
    return running.pop(pid), os.waitstatus_to_exitcode(status)


def output_of(process: PlannedProcess) -> str:
    log = (process.folder / LOG).read_text(errors="replace")
    return without_libraries(parse(log.splitlines()))[0]


def end_with_problem(process: PlannedProcess, end: str) -> None:
    """Leave what is wrong with a process for npurun to print, and end this one, which ends them all."""
    Path(process.directory, PROBLEM).write_text(problem_text(process, end), encoding="utf-8")
    os._exit(1)


def problem_text(process: PlannedProcess, end: str) -> str:
    tail = "\n".join(output_of(process).splitlines()[-_TAIL_LINES:])
    written = _written(process, tail)
    return f"as {process.name}, the script {end}. The end of its output:\n{tail}{written}"


def _written(process: PlannedProcess, output: str) -> str:
    """Return what to do if an error is about a file that the run has written; else ""."""
    lines = [line for line in output.splitlines() if _MISSING.search(line)]
    for path in _WORD.findall("\n".join(lines)):
        # Some calls look for files only where the user has them.
        if os.path.lexists(f"{process.files}{os.path.abspath(path)}"):
            return (
                f"\nThis run has written {path}, and keeps it apart.\nWhat to do: run the script once without npurun "
                "verify or speed, so that the file is there."
            )
    return ""
