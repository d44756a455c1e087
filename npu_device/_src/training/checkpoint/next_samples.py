"""The samples that iterators of a loop would give next, by which a job with another number of ranks goes on there.

A batch of all ranks has the same samples on any number of ranks if ``shard_and_rebatch_dataset`` has divided it. So an
iterator is moved on by one batch for each step, and then compared: checksums of samples, added up over all ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.time_limits import NEXT_PROGRESS_SECONDS
from npu_device._src.collectives.engine_text import say
from npu_device._src.training.checkpoint.selection import gather
from npu_device._src.training.watching.digests import checksum
from npu_device._src.world.world import World

Checksums = Mapping[str, int]
"""Of the next samples of one rank, by the name of the iterator."""
_BATCHES_TOGETHER = 500  # after which all ranks wait for each other
_PASSES = "npu_device: {name} (per_rank) passes over {steps:,} batches, {done:,} so far, for another number of ranks"
_COUNTED = 4096  # elements of a sample that count, at equal distances, if it has more


def look_ahead(iterators: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums of the next batches, which the iterators will give again."""
    if not iterators:
        return {}
    checkpoint = tf.train.Checkpoint(**iterators)
    with tempfile.TemporaryDirectory() as directory:
        positions = checkpoint.write(f"{directory}/positions")
        checksums = {name: checksum_of(next(iterator, ())) for name, iterator in iterators.items()}
        checkpoint.read(positions).assert_consumed()
    return checksums


def move_on(
    world: World | None, iterators: Mapping[str, Any], steps: int, saved: Sequence[Checksums]
) -> list[str]:
    """Move iterators on by the batches of some steps; return a sentence on each that has other samples there.

    ``saved`` are the checksums of all ranks that have stopped after these steps. Every rank has to make the call.
    """
    for name, iterator in iterators.items():
        _pass_over(world, name, iterator, steps)
    by_rank = gather(world, look_ahead(iterators))
    lost = []
    for name in iterators:
        expected = [by_name.get(name, 0) for by_name in saved]
        actual = [by_name[name] for by_name in by_rank]
        # Ranks that all read the same samples have equal checksums.
        if sum(actual) != sum(expected) and set(actual) != set(expected):
            lost.append(_OTHER_SAMPLES.format(name=name, steps=steps))
    return lost


_OTHER_SAMPLES = (
    "{name} (per_rank): {steps} batches were passed over, one for each step, and it gives other samples next than "
    "before. What to do: divide data with shard_and_rebatch_dataset after shuffle, give shuffle a seed, and take one "
    "batch for each step"
)


def _pass_over(world: World | None, name: str, iterator: Any, steps: int) -> None:
    """Read one batch for each step. Ranks stay together, as the fastest would give up waiting for the others."""
    is_main = world is None or world.is_main
    said_at = -NEXT_PROGRESS_SECONDS
    for step in range(steps):
        if step % _BATCHES_TOGETHER == 0 and steps > _BATCHES_TOGETHER:
            if world is not None:
                world.wait()
            if is_main and time.monotonic() - said_at > NEXT_PROGRESS_SECONDS:
                say([_PASSES.format(name=name, done=step, steps=steps)])
                said_at = time.monotonic()
        # At the end of the data, the comparison finds that they are too few.
        next(iterator, None)


def checksum_of(batches: Any) -> int:
    """Return a checksum of the samples of batches, the sum of a checksum of each; 0 at the end of the data.

    Samples are rows of nested tensors, and count in any order, as other ranks have other rows.
    """
    total = 0
    for tensor in tf.nest.flatten(batches, expand_composites=True):
        dtype = getattr(tensor, "dtype", None)
        # Datasets of datasets have elements without values.
        if tensor is None or dtype in (tf.variant, tf.resource):
            continue
        for row in np.atleast_1d(np.asarray(tensor)):
            flat = np.ravel(row)
            flat = flat[:: max(flat.size // _COUNTED, 1)]
            total += checksum(flat)
    return total
