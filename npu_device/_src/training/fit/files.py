"""Files that a replicated model and its callbacks write: each is written once, and complete when anybody reads it."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from npu_device._src.training.world import World

_WRITERS = ("CSVLogger", "TensorBoard", "RemoteMonitor", "BackupAndRestore")
"""Callbacks that only rank 0 runs. ``ModelCheckpoint`` decides on every rank and writes by the model's methods."""

_FILES = (".keras", ".h5", ".hdf5")


def saving(world: World, own: Callable[..., Any], in_fit: Callable[[], bool]) -> Callable[..., Any]:
    """Return a model's ``save`` or ``save_weights`` that every rank may call with one path.

    Args:
        world: the ranks.
        own: the model's own method.
        in_fit: tells whether ``fit`` is running, so that the call comes from a callback, on all ranks.

    Returns:
        The method. In ``fit`` rank 0 writes. Elsewhere, each calling rank writes a single file next to its destination
        and moves it there when complete; rank 0 writes a directory, or several files.
    """

    @functools.wraps(own)
    def save(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        alone = not isinstance(filepath, (str, os.PathLike)) or args or set(kwargs) - {"overwrite"}
        path = None if alone or "://" in str(filepath) else Path(filepath)
        if path is None or path.suffix not in _FILES or path.is_dir() or not kwargs.get("overwrite", True):
            return own(filepath, *args, **kwargs) if world.is_main else None
        if in_fit() and not world.is_main:
            return None
        beside = path.with_name(f".rank{world.rank}-{os.getpid()}-{path.name}")
        try:
            result = own(str(beside), **kwargs)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        return result

    return save


def writes(callback: Any, keras: Any) -> bool:
    """Return True for a callback that only rank 0 runs."""
    kinds: Sequence[type] = [getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name)]
    return isinstance(callback, tuple(kinds))


def counters_from_root(world: World, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return tf-keras's method for the epoch and step with which ``fit`` begins, which are rank 0's."""

    @functools.wraps(own)
    def counters(*args: Any, **kwargs: Any) -> Any:
        return world.object_from_root(own(*args, **kwargs))

    return counters
