"""Files that a replicated model and its callbacks write: each is written once, and complete when anybody reads it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training import training_state
from npu_device._src.training.world import World

_END_OF_EPOCH = "end of an epoch (earlier on ranks with fewer batches, or that set stop_training)"
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


def callbacks_of_rank(world: World, model: Any, callbacks: Any) -> Any:
    """Return the callbacks that ``fit`` gets on this rank.

    Callbacks that write run on rank 0. The last callback makes the ranks wait for each other after each epoch, when the
    files are there; stops all ranks when one wants to stop; and tells them at which epoch rank 0's backup begins.
    """
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        if hasattr(callbacks, "callbacks"):  # Keras's own list, created by the script
            return callbacks
        callbacks = [callbacks]
    keras = compat.keras_of(model)
    mine = [callback for callback in callbacks or [] if world.is_main or not _writes(callback, keras)]

    class RanksMeet(keras.callbacks.Callback):  # type: ignore[name-defined]
        """The last callback; without methods for batches, which would slow Keras down."""

        def on_train_begin(self, logs: Any = None) -> None:
            if hasattr(model, "_initial_epoch"):  # Keras 3; BackupAndRestore may have set it on rank 0
                model._initial_epoch = world.object_from_root(model._initial_epoch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found = world.objects((bool(model.stop_training), _learning_rates(model)), _END_OF_EPOCH)
            model.stop_training = any(stops for stops, _ in found)
            _require_equal_rates(world, [rates for _, rates in found])

    return [*mine, RanksMeet()]


def _learning_rates(model: Any) -> list[float]:
    rates = []
    for optimizer in training_state.optimizers(model):
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # a legacy optimizer's schedule
            rates.append(float(optimizer.learning_rate))
    return rates


def _require_equal_rates(world: World, rates: Sequence[list[float]]) -> None:
    if all(repr(each) == repr(rates[0]) for each in rates):  # NaN equals NaN
        return
    lines = [
        f"  rank {rank} on host {world.runtime.cluster.hosts[rank]}: {', '.join(f'{rate:g}' for rate in each)}"
        for rank, each in zip(world.group.ranks, rates)
    ]
    raise RuntimeError(
        f"rank {world.runtime.cluster.rank}: the ranks have different learning rates at the end of an epoch:\n"
        + "\n".join(lines)
        + "\nLikely cause: a callback that changes the learning rate is passed on some ranks only.\n"
        "What to do: pass it on every rank; the logs are the same everywhere, so that it decides alike."
    )


def _writes(callback: Any, keras: Any) -> bool:
    kinds: Sequence[type] = [getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name)]
    return isinstance(callback, tuple(kinds))


def counters_from_root(world: World, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return tf-keras's method for the epoch and step with which ``fit`` begins, which are rank 0's."""

    @functools.wraps(own)
    def counters(*args: Any, **kwargs: Any) -> Any:
        return world.object_from_root(own(*args, **kwargs))

    return counters
