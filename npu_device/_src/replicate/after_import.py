"""Tells when a script has imported TensorFlow or a Keras: what it sets before (``TF_USE_LEGACY_KERAS``) counts."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Callable

KERAS_PACKAGES = ("keras", "tf_keras")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``imported`` with the watched modules when the outermost import of one has ended: TensorFlow, both
    packages of Keras, and ``names``.
    """

    def __init__(self, imported: Callable[[Sequence[ModuleType]], None], *names: str) -> None:
        self._imported = imported
        self._names = ("tensorflow", *KERAS_PACKAGES, *names)
        # Modules that the script's start has imported already.
        self._waiting = [sys.modules[name] for name in self._names if name in sys.modules]
        self._depth = 0
        sys.meta_path.insert(0, self)
        self._call()

    def _call(self) -> None:
        if self._waiting and not self._depth:
            modules = self._waiting
            self._waiting = []
            self._imported(modules)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Return the spec that Python would find on its path, with a loader that tells the end of the import."""
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The depth is counted, since imports nest: Keras imports TensorFlow.
            self._depth += 1
            try:
                run(module)
            finally:
                self._depth -= 1
            self._waiting.append(module)
            self._call()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
