"""One process of ``npurun verify``: ``python -m npu_device._src.verify.runner SETTINGS script argument …``.

It seeds, runs the script as ``python`` would, and wraps Keras and TensorFlow when the script imports them, so that
variables which the script sets before (``TF_USE_LEGACY_KERAS``) still count.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import os
import random
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Callable

from npu_device._src import environment
from npu_device._src.verify import file_shadow
from npu_device._src.verify.process_settings import FAILED, Settings

_SEED = 20201
_WATCHED = ("tensorflow", "keras", "tf_keras", "npu_device.distribute")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back with the watched modules that have been imported, once TensorFlow is complete: it imports Keras."""

    def __init__(self, imported: Callable[[Sequence[ModuleType]], None]) -> None:
        self._imported = imported
        self._busy: set[str] = set()
        self._waiting: list[ModuleType] = []
        self._tensorflow = False

    def take_imported(self) -> None:
        """Call back with modules that were imported before."""
        self._tensorflow = "tensorflow" in sys.modules
        modules = [sys.modules[name] for name in _WATCHED[1:] if name in sys.modules]
        if modules:
            self._imported(modules)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in _WATCHED or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._tensorflow |= name == "tensorflow"
            self._waiting += [module] if name != "tensorflow" else []
            if self._tensorflow:
                modules, self._waiting = self._waiting, []
                self._imported(modules)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(arguments: Sequence[str]) -> None:
    """Run a script and record its steps."""
    settings = Settings.read(arguments[0])
    rank = (environment.RANK_ID.get() or 0) if settings.ranks > 1 else 0
    script, sys.argv = arguments[1], list(arguments[1:])
    _seed()
    recorders: list[Any] = []

    def imported(modules: Sequence[ModuleType]) -> None:
        from npu_device._src.verify.step_records import Recorder
        from npu_device._src.verify.wrapping import Hooks

        if not recorders:
            recorders.append(Recorder(settings, rank))
            recorders.append(Hooks(recorders[0], _SEED))
            redirected.install_tensorflow(sys.modules["tensorflow"])
        for module in modules:
            recorders[1].install(module)

    finder = _AfterImport(imported)
    sys.meta_path.insert(0, finder)
    redirected = file_shadow.redirect(settings.folder(rank) / "files", settings.directory, script)
    atexit.register(lambda: recorders and recorders[0].finish())
    finder.take_imported()
    try:
        if settings.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            folder = settings.folder(rank)
            folder.mkdir(parents=True, exist_ok=True)
            redirected.restore()
            (folder / FAILED).write_text(traceback.format_exc(), encoding="utf-8")
        raise


def _seed() -> None:
    import numpy as np

    random.seed(_SEED)
    np.random.seed(_SEED)


if __name__ == "__main__":
    main(sys.argv[1:])
