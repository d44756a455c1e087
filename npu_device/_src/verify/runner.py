"""The processes of ``npurun verify``: ``python -m npu_device._src.verify.runner SETTINGS script argument …``.

One process begins the script, as ``python`` would, until TensorFlow is imported: most of a script's start. There it
becomes all the others, by forks. Each goes on by itself, as a single process or with the variables of a rank, and wraps
Keras and TensorFlow first. Variables that the script sets before (``TF_USE_LEGACY_KERAS``) count. A script that asks
for its rank earlier is forked when it asks.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from npu_device._src.replicate.after_import import AfterImport
from npu_device._src.replicate.main_program import run_main
from npu_device._src.replicate.wrapped_models import Models
from npu_device._src.verify import file_shadow
from npu_device._src.verify.process_settings import CODE, FAILED, LOG, START, Settings, read

_SEED = 20201


class _Processes:
    """This process, which becomes those of all runs.

    Attributes:
        mine: the settings of the process that this one is.
    """

    def __init__(self, runs: Sequence[Sequence[Settings]], script: str) -> None:
        self.mine = replace(runs[0][0], run=START)
        self._runs = runs
        self._hooks: Any = None
        self._models = Models(None)
        self._redirected = file_shadow.Redirection(self.mine.folder / "files", self.mine.directory, script)
        self._redirected.install()
        variables, self._read = type(os.environ), type(os.environ).__getitem__
        of_ranks = {name for run in runs for process in run for name in process.environment}

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
        for run in self._runs:
            children = {}
            for process in run:
                pid = os.fork()
                if not pid:
                    random.setstate(drawn)
                    self._become(process)
                    return
                children[pid] = process
            codes = []
            for pid, process in children.items():
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                (process.folder / CODE).write_text(str(codes[-1]))
            if any(codes):
                break
        os._exit(0)

    def _become(self, process: Settings) -> None:
        self.mine = process
        process.folder.mkdir(parents=True)
        with (process.folder / LOG).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(process.environment)
        self._redirected.move(process.folder / "files")

    def imported(self, modules: Sequence[ModuleType]) -> None:
        """Go on as one of the processes, and wrap what the script has imported."""
        self._fork()
        if self.mine.replicate and self.mine.ranks > 1:
            self._models.imported(modules)
        if self._hooks is None:
            from npu_device._src.verify.step_records import Recorder
            from npu_device._src.verify.wrapping import Hooks

            recorder = Recorder(self.mine)
            atexit.register(recorder.finish)
            self._hooks = Hooks(recorder, _SEED)
            self._redirected.install_tensorflow(sys.modules["tensorflow"])
        for module in modules:
            self._hooks.install(module)

    def failed(self) -> None:
        """Leave the error that is being handled."""
        self._redirected.restore()
        self.mine.folder.mkdir(parents=True, exist_ok=True)
        (self.mine.folder / FAILED).write_text(traceback.format_exc(), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Run a script as all processes, and record their steps."""
    runs = read(arguments[0])
    script, sys.argv = arguments[1], list(arguments[1:])
    _seed()
    processes = _Processes(runs, script)
    AfterImport(processes.imported, "npu_device.distribute")
    try:
        run_main(script, runs[0][0].module)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            processes.failed()
        raise


def _seed() -> None:
    import numpy as np

    random.seed(_SEED)
    np.random.seed(_SEED)


if __name__ == "__main__":
    main(sys.argv[1:])
