"""Runs a script as all processes of ``npurun verify``: ``python -m`` this module, with SETTINGS script argument ….

One process begins the script, as ``python`` would, until TensorFlow is imported: most of a script's start. There it
becomes all the others, by forks. Each goes on by itself, as a single process or with the variables of a rank, and wraps
Keras and TensorFlow first. Variables that the script sets before (``TF_USE_LEGACY_KERAS``) count. A script that asks
for its rank earlier is forked when it asks.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from npu_device._src.cluster.time_limits import OTHERS_FAIL_SECONDS, RECORDS_SECONDS, SWEEP_SECONDS
from npu_device._src.cluster.tracebacks import parse, without_libraries
from npu_device._src.comparison import compare
from npu_device._src.replicate.after_import import AfterImport
from npu_device._src.replicate.main_program import run_main
from npu_device._src.replicate.wrapped_models import Models
from npu_device._src.verify import file_shadow
from npu_device._src.verify.plan import DONE, FAILED, FAR_MORE, LOG, PROBLEM, START, PlannedProcess

_SEED = 20201
_TAIL_LINES = 25
_INDIVISIBLE = "the global batch size must be divisible by the number of ranks"


class _ForkingProcess:
    """This process, which becomes the processes of all runs.

    Attributes:
        plan: what this process is to be.
    """

    def __init__(self, start: PlannedProcess, sizes: Sequence[int], script: str) -> None:
        self._runs = start.runs(sizes)
        self._recorder: Any = None
        self._models = Models(None)
        self._redirection = file_shadow.Redirection(start.directory, script)
        self._become(start)
        self._redirection.install()
        self._fork_at_variables()

    def _fork_at_variables(self) -> None:
        """Fork as soon as the script reads a variable that ranks have."""
        environ_class = type(os.environ)
        self._read_variable = environ_class.__getitem__
        names = {
            name
            for processes in self._runs
            for process in processes
            for name in process.environment()
        }

        def read(environ: Any, name: str) -> str:
            if name in names:
                self._fork()
            return self._read_variable(environ, name)

        environ_class.__getitem__ = read  # type: ignore[method-assign]

    def _fork(self) -> None:
        """Become the processes of all runs, one run after the other; return in each of them."""
        if self.plan.run != START:
            return
        type(os.environ).__getitem__ = self._read_variable  # type: ignore[method-assign]
        sys.stdout.flush()
        sys.stderr.flush()
        random_state = random.getstate()  # which Python sets anew in every fork
        single_seconds = 0.0
        # The ranks of a run need each other; runs would compete for memory.
        for processes in self._runs:
            self._redirection.copy(processes[0].files)
            begin = time.monotonic()
            running = {}
            for process in processes:
                pid = os.fork()
                if not pid:
                    random.setstate(random_state)
                    self._become(process)
                    return
                running[pid] = process
            _wait(running, self._runs[1], single_seconds)
            single_seconds = single_seconds or time.monotonic() - begin
        # The script goes on in the other processes, and has only begun in this one.
        os._exit(0)

    def _become(self, process: PlannedProcess) -> None:
        self.plan = process
        process.folder.mkdir(parents=True)
        with (process.folder / LOG).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(process.environment())
        self._redirection.move(process.files)

    def imported(self, modules: Sequence[ModuleType]) -> None:
        """Go on as one of the processes, and wrap what the script has imported."""
        self._fork()
        if self.plan.replicate and self.plan.ranks > 1:
            self._models.imported(modules)
        if self._recorder is None:
            from npu_device._src.verify.step_recorder import StepRecorder

            self._recorder = StepRecorder(self.plan, _SEED)
            self._redirection.install_tensorflow(sys.modules["tensorflow"])
        for module in modules:
            self._recorder.install(module)


def _wait(
    running: dict[int, PlannedProcess], requested: Sequence[PlannedProcess], single_seconds: float
) -> None:
    """Wait until each process of a run has recorded its last step or ended, and end them all.

    Ranks may take a multiple of the seconds of the single process; 0 for no limit. A number of ranks that isn't the
    requested one may be one that can't divide the batch.
    """
    deadline = math.inf
    if single_seconds:
        deadline = time.monotonic() + max(FAR_MORE * single_seconds, RECORDS_SECONDS)
    while not all((process.folder / DONE).exists() for process in running.values()):
        time.sleep(SWEEP_SECONDS)
        is_late = time.monotonic() > deadline
        if is_late and all(compare.exists(process.folder) for process in running.values()):
            break
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in running:
            continue
        process = running.pop(pid)
        # Three ranks are tried by default, whether the batch can be divided by 3 or not.
        is_extra = process.ranks > requested[0].ranks
        if status and is_extra and _INDIVISIBLE in _output(process):
            break
        _take_note_of_end(process, status)
        if status:
            deadline = min(deadline, time.monotonic() + OTHERS_FAIL_SECONDS)
    # What is compared is on disk, and a loop of the script may go on for hours.
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _take_note_of_end(process: PlannedProcess, status: int) -> None:
    """Keep how a process has ended; end this one if it has left no step."""
    end = "ended before its first step"
    if status:
        end = f"failed with exit code {os.waitstatus_to_exitcode(status)}"
    if not (compare.exists(process.folder) and compare.load(process.folder).steps):
        _report_problem(process, end)
    if status:
        (process.folder / FAILED).write_text(_problem(process, end), encoding="utf-8")
    (process.folder / DONE).touch()  # for those that go as far


def _output(process: PlannedProcess) -> str:
    log = (process.folder / LOG).read_text(errors="replace")
    return without_libraries(parse(log.splitlines()))[0]


def _report_problem(process: PlannedProcess, end: str) -> None:
    """Leave what is wrong with a process, and end."""
    Path(process.directory, PROBLEM).write_text(_problem(process, end), encoding="utf-8")
    os._exit(1)


def _problem(process: PlannedProcess, end: str) -> str:
    tail = "\n".join(_output(process).splitlines()[-_TAIL_LINES:])
    return f"as {process.name}, the script {end}. The end of its output:\n{tail}"


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and record their steps."""
    settings = json.loads(arguments[0])
    sizes = settings.pop("sizes")
    start = PlannedProcess(**settings)
    script = arguments[1]
    sys.argv = list(arguments[1:])
    random.seed(_SEED)
    np.random.seed(_SEED)
    process = _ForkingProcess(start, sizes, script)
    AfterImport(process.imported, "npu_device.distribute")
    try:
        run_main(script, start.module)
    except BaseException:
        if process.plan is not start:
            raise
        traceback.print_exc()
    if process.plan is start:
        _report_problem(start, "ended before its first step")


if __name__ == "__main__":
    main(sys.argv[1:])
