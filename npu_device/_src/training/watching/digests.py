"""Checksums of values, and a text about those that differ between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.job import Job

SHOWN_VARIABLES = 4
SHOWN_RANKS = 16

DIFFERENT_START = "the ranks begin training with different values of %s%s"
BROADCAST = (
    "\nLikely cause: no broadcast, a layer that was built after it, or another seed on each rank.\nWhat to do: build "
    "the whole model, and call npu.distribute.broadcast(model.variables) before the first step."
)

Digest = tuple[tuple[int, ...], str, int]  # shape, dtype and checksum of a value


def digest_of(value: Any) -> Digest:
    if not isinstance(value, np.ndarray):
        value = compat.to_array(tf.convert_to_tensor(value))
    return tuple(value.shape), value.dtype.name, checksum(value)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum of a tensor or an array; ``before`` is the checksum of the data that come before it."""
    array = np.ascontiguousarray(compat.to_array(value) if tf.is_tensor(value) else value)
    data = (
        repr(array.tolist()).encode()
        if array.dtype == object
        else array.reshape(-1).view(np.uint8).data
    )
    return zlib.crc32(data, before)


def variable_name(variable: Any) -> str:
    """Return the name of a variable with that of its model or layer."""
    return str(getattr(variable, "path", None) or variable.name)


def named(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_VARIABLES]) + (", …" if len(names) > SHOWN_VARIABLES else "")


def differences(
    cluster: Cluster, ranks: Sequence[int], names: Sequence[str], values: Sequence[Sequence[Any]]
) -> tuple[list[int], str] | None:
    """Return the positions of variables whose values (of each rank, in order) differ, and a text; None if none do."""
    places = [place for place, found in enumerate(zip(*values)) if len(set(found)) > 1]
    if not places:
        return None
    different, first = [names[place] for place in places], [mine[places[0]] for mine in values]
    shown = [f"digest {value:08x}" if isinstance(value, int) else value for value in first]
    lines = cluster.lines(
        {rank: f"{value} of {different[0]}" for rank, value in zip(ranks, shown)}, SHOWN_RANKS
    )
    return places, "\n".join(
        [f"{len(places)} of {len(names)} variables ({named(different)}):", *lines]
    )


def different_start(
    job: Job, name: str, names: Sequence[str], remedy: str, *checksums: Sequence[int]
) -> str | None:
    """Post checksums of variables at some times; on the last rank, return a text about those that never were equal."""
    cluster = job.cluster
    try:
        everybody = job.store.post(name, [list(each) for each in zip(*checksums)])
    except ClusterError:
        return None  # the next collective tells
    rows = [everybody[rank] for rank in sorted(everybody)]
    if len(rows) < cluster.world_size or any(len(row) != len(names) for row in rows):
        return None
    apart = [all(len(set(each)) > 1 for each in zip(*found)) for found in zip(*rows)]
    first = [[each[0] if differs else 0 for each, differs in zip(row, apart)] for row in rows]
    found = differences(cluster, range(cluster.world_size), names, first)
    return None if found is None else DIFFERENT_START % (found[1], remedy)
