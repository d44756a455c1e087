"""The callbacks of a replicated model's ``fit``, and what its ranks exchange at the end of each epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training import training_state
from npu_device._src.training.fit.files import writes
from npu_device._src.training.world import World

_END_OF_EPOCH = "end of an epoch (earlier on ranks with fewer batches, or that set stop_training)"


def callbacks_of_rank(world: World, model: Any, callbacks: Any, compare_batches: Callable[[], None]) -> Any:
    """Return the callbacks that ``fit`` gets on this rank.

    Callbacks that write run on rank 0. The last callback makes the ranks wait for each other after each epoch, when the
    files are there; stops all ranks when one wants to stop; compares their learning rates and batches; and tells them
    at which epoch rank 0's backup begins.
    """
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        if hasattr(callbacks, "callbacks"):  # Keras's own list, created by the script
            return callbacks
        callbacks = [callbacks]
    keras = compat.keras_of(model)
    mine = [callback for callback in callbacks or [] if world.is_main or not writes(callback, keras)]

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
        f"  {world.runtime.cluster.name_of(rank)}: {', '.join(f'{rate:g}' for rate in each)}"
        for rank, each in zip(world.group.ranks, rates)
    ]
    raise RuntimeError(
        f"rank {world.runtime.cluster.rank}: the ranks have different learning rates at the end of an epoch:\n"
        + "\n".join(lines)
        + "\nLikely cause: a callback that changes the learning rate is passed on some ranks only.\n"
        "What to do: pass it on every rank; the logs are the same everywhere, so that it decides alike."
    )
