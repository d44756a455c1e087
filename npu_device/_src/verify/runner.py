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
from npu_device._src.verify.plan import DONE, FAILED, FAR_MORE, LOG, PROBLEM, START, Process

_SEED = 20201
_TAIL_LINES = 25
_INDIVISIBLE = "the global batch size must be divisible by the number of ranks"


class _Processes:
    """This process, which becomes those of all runs.

    Attributes:
        mine: the process that this one is.
    """

    def __init__(self, start: Process, sizes: Sequence[int], script: str) -> None:
        self._runs = start.runs(sizes)
        self._recorder: Any = None
        self._models = Models(None)
        self._redirected = file_shadow.Redirection(start.directory, script)
        self._become(start)
        self._redirected.install()
        variables, self._read = type(os.environ), type(os.environ).__getitem__
        of_ranks = {name for run in self._runs for process in run for name in process.environment()}

        def get(environ: Any, name: str) -> str:
            if name in of_ranks:
                self._fork()
            return self._read(environ, name)

        variables.__getitem__ = get  # type: ignore[method-assign]

    def _fork(self) -> None:
        """Become the processes of all runs, one run after the other; return in each of them."""
        if self.mine.run != START:
            return
        type(os.environ).__getitem__ = self._read  # type: ignore[method-assign]
        sys.stdout.flush()
        sys.stderr.flush()
        drawn = random.getstate()  # which Python sets anew in every fork
        seconds = 0.0  # of the single process
        for run in self._runs:
            self._redirected.copy(run[0].files)
            begin = time.monotonic()
            waiting = {}
            for process in run:
                pid = os.fork()
                if not pid:
                    random.setstate(drawn)
                    self._become(process)
                    return
                waiting[pid] = process
            _wait(waiting, self._runs[1], seconds)
            seconds = seconds or time.monotonic() - begin
        os._exit(0)

    def _become(self, process: Process) -> None:
        self.mine = process
        process.folder.mkdir(parents=True)
        with (process.folder / LOG).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(process.environment())
        self._redirected.move(process.files)

    def imported(self, modules: Sequence[ModuleType]) -> None:
        """Go on as one of the processes, and wrap what the script has imported."""
        self._fork()
        if self.mine.replicate and self.mine.ranks > 1:
            self._models.imported(modules)
        if self._recorder is None:
            from npu_device._src.verify.step_recorder import Recorder

            self._recorder = Recorder(self.mine, _SEED)
            self._redirected.install_tensorflow(sys.modules["tensorflow"])
        for module in modules:
            self._recorder.install(module)


def _wait(waiting: dict[int, Process], asked_for: Sequence[Process], seconds: float) -> None:
    """Wait until each process of a run has recorded its last step or ended, and end them all.

    Ranks may take a multiple of the seconds of the single process; 0 for no limit. A number of ranks for which nobody
    has asked may be one that can't divide the batch.
    """
    until = time.monotonic() + max(FAR_MORE * seconds, RECORDS_SECONDS) if seconds else math.inf
    while not all((process.folder / DONE).exists() for process in waiting.values()):
        time.sleep(SWEEP_SECONDS)
        if time.monotonic() > until and all(
            compare.exists(process.folder) for process in waiting.values()
        ):
            break
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in waiting:
            continue
        ended = waiting.pop(pid)
        if status and ended.ranks > asked_for[0].ranks and _INDIVISIBLE in _output(ended):
            break
        what = (
            f"failed with exit code {os.waitstatus_to_exitcode(status)}"
            if status
            else "ended before its first step"
        )
        if not (compare.exists(ended.folder) and compare.load(ended.folder).steps):
            _report_problem(ended, what)
        if status:
            (ended.folder / FAILED).write_text(_problem(ended, what), encoding="utf-8")
            until = min(until, time.monotonic() + OTHERS_FAIL_SECONDS)
        (ended.folder / DONE).touch()  # for those that go as far
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _output(process: Process) -> str:
    log = (process.folder / LOG).read_text(errors="replace")
    return without_libraries(parse(log.splitlines()))[0]


def _report_problem(process: Process, what: str) -> None:
    """Leave what is wrong with a process, and end."""
    Path(process.directory, PROBLEM).write_text(_problem(process, what), encoding="utf-8")
    os._exit(1)


def _problem(process: Process, what: str) -> str:
    end = "\n".join(_output(process).splitlines()[-_TAIL_LINES:])
    return f"as {process.name}, the script {what}. The end of its output:\n{end}"


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and record their steps."""
    settings = json.loads(arguments[0])
    sizes, start = settings.pop("sizes"), Process(**settings)
    script, sys.argv = arguments[1], list(arguments[1:])
    random.seed(_SEED)
    np.random.seed(_SEED)
    processes = _Processes(start, sizes, script)
    AfterImport(processes.imported, "npu_device.distribute")
    try:
        run_main(script, start.module)
    except BaseException:
        if processes.mine is not start:
            raise
        traceback.print_exc()
    if processes.mine is start:
        _report_problem(start, "ended before its first step")


if __name__ == "__main__":
    main(sys.argv[1:])
