"""A ``keras.utils.PyDataset`` or ``Sequence`` with a method ``rows``: each rank makes its own rows of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_device._src import compat
from npu_device._src.training.fit import start
from npu_device._src.training.fit.divided import with_rows
from npu_device._src.training.fit.share import rows_of
from npu_device._src.training.world import World

_SETTINGS = ("workers", "use_multiprocessing", "max_queue_size")  # of a PyDataset in Keras 3


def has_rows(model: Any, data: Any) -> bool:
    """Return True for a PyDataset or Sequence, of the Keras of a model, with a method ``rows(index, start, stop)``."""
    return isinstance(data, compat.keras_of(model).utils.Sequence) and callable(getattr(data, "rows", None))


def rows_of_rank(world: World, model: Any, data: Any) -> Any:
    """Return a PyDataset or Sequence of this rank's rows of each batch.

    ``data.rows`` returns what ``data[index]`` would return, but only the samples from ``start`` to before ``stop``, as
    a slice does: fewer, or none, at the end of the batch. No batch is larger than the first one.

    Raises:
        ValueError: ``rows`` doesn't give the samples of the first batch.
    """
    whole = data[0]
    batch = int(rows_of(whole))
    first, last = (place * batch // world.size for place in (world.rank, world.rank + 1))
    _require_same_rows(world, whole, data.rows(0, first, last), first, last)

    class Rows(compat.keras_of(model).utils.Sequence):  # type: ignore[misc]
        """The rows of this rank; a batch without any has one that doesn't count."""

        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            mine = data.rows(index, first, last) if last > first else None
            count = 0 if mine is None else int(rows_of(mine))
            mark = index if index else start.digest(data.rows(0, 0, 1))  # of what on_epoch_end may have shuffled
            return with_rows(np.array([count, mark]), mine if count else data.rows(index, 0, 1))

        def on_epoch_begin(self) -> None:
            getattr(data, "on_epoch_begin", int)()

        def on_epoch_end(self) -> None:
            data.on_epoch_end()

    return Rows(**{name: getattr(data, name) for name in _SETTINGS if hasattr(data, name)})


def _require_same_rows(world: World, whole: Any, mine: Any, first: int, last: int) -> None:
    import tensorflow as tf

    expected = start.digest(tf.nest.map_structure(lambda leaf: leaf[first:last], whole))
    found = world.objects(expected == start.digest(mine), "rows of the first batch")
    if not all(found):
        wrong = ", ".join(str(rank) for rank, right in enumerate(found) if not right)
        raise ValueError(
            f"rank {world.rank}: rows(0, {first}, {last}) isn't data[0][{first}:{last}] (on ranks {wrong}).\n"
            "Likely cause: rows draws random numbers, or counts its samples from the beginning of the data.\nWhat to "
            "do: let rows(index, start, stop) return what data[index] returns, but only the samples from start to "
            "before stop of that batch; draw random numbers by a seed made of the index of the sample."
        )
