"""The callbacks of a replicated model's ``fit``, and what its ranks exchange at the end of each epoch."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training import training_state
from npu_device._src.training.world import World

_END_OF_EPOCH = "end of an epoch (earlier on ranks with fewer batches, or that set stop_training)"

_WRITE = ("CSVLogger", "TensorBoard", "RemoteMonitor", "BackupAndRestore", "OrbaxCheckpoint")
"""Keras's callbacks that write by themselves. ``ModelCheckpoint`` writes by the methods of the model."""

_SPEAK = ("ModelCheckpoint", "EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler")
"""Keras's callbacks that decide on every rank, and print what they do if ``verbose`` is set."""


def callbacks_of_rank(world: World, model: Any, callbacks: Any, compare_batches: Callable[[], None]) -> Any:
    """Return the callbacks that ``fit`` gets on this rank.

    Callbacks that write run on rank 0. The last callback makes the ranks wait for each other after each epoch, when the
    files are there; stops all ranks when one wants to stop; compares their learning rates and batches; and tells them
    at which epoch the backup of rank 0 begins.
    """
    keras = compat.keras_of(model)
    given = getattr(callbacks, "callbacks", callbacks)  # of Keras's own list, created by the script
    given = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    mine = [callback for callback in given if world.is_main or not _is_one_of(_WRITE, callback, keras)]
    for callback in given:
        if _is_one_of(("ModelCheckpoint",), callback, keras):
            _make_directory(str(callback.filepath))

    class RanksMeet(keras.callbacks.Callback):  # type: ignore[name-defined]
        """The last callback; without methods for batches, which would slow Keras down."""

        def on_train_begin(self, logs: Any = None) -> None:
            if hasattr(model, "_initial_epoch"):  # Keras 3; BackupAndRestore may have set it on rank 0
                model._initial_epoch = world.object_from_root(model._initial_epoch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found = world.objects((bool(model.stop_training), _learning_rates(model)), _END_OF_EPOCH)
            model.stop_training = any(stops for stops, _ in found)
            _require_equal_rates(world, [rates for _, rates in found])
            compare_batches()

    meet = RanksMeet()
    if not hasattr(callbacks, "callbacks"):
        return [*mine, meet]
    meet.set_model(model)
    own_list = copy.copy(callbacks)  # the script's may serve another ``fit``
    own_list.callbacks = [*mine, meet]
    return own_list


@contextlib.contextmanager
def silent(world: World, model: Any, callbacks: Any) -> Iterator[None]:
    """Let only rank 0 print what Keras's callbacks decide, which all ranks do alike."""
    keras = compat.keras_of(model)
    given = [] if world.is_main else getattr(callbacks, "callbacks", callbacks)
    before = [(each, each.verbose) for each in given if _is_one_of(_SPEAK, each, keras)]
    for callback, _ in before:
        callback.verbose = 0
    try:
        yield
    finally:
        for callback, verbose in before:
            callback.verbose = verbose


def _is_one_of(names: Sequence[str], callback: Any, keras: Any) -> bool:
    kinds = [getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name)]
    return isinstance(callback, tuple(kinds))


def _make_directory(file: str) -> None:
    """Make the directory for the files of a callback, which Keras 3 would try on all ranks at once; one of them
    fails."""
    directory = os.path.dirname(file)
    if directory and "{" not in directory and "://" not in directory:
        os.makedirs(directory, exist_ok=True)


def _learning_rates(model: Any) -> list[float]:
    rates = []
    for optimizer in training_state.optimizers(model):
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # a legacy optimizer's schedule
            rates.append(float(optimizer.learning_rate))
    return rates


def _require_equal_rates(world: World, rates: Sequence[list[float]]) -> None:
    if all(repr(each) == repr(rates[0]) for each in rates):  # NaN equals NaN
        return
    lines = world.lines(", ".join(f"{rate:g}" for rate in each) for each in rates)
    raise RuntimeError(
        f"rank {world.job.cluster.rank}: the ranks have different learning rates at the end of an epoch:\n"
        f"{lines}\nLikely cause: a callback that changes the learning rate is passed on some ranks only.\n"
        "What to do: pass it on every rank; the logs are the same everywhere, so that it decides alike."
    )
