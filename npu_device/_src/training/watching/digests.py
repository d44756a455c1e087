"""Checksums of values, and a text about those that differ between ranks."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.job import Job
from npu_device._src.wording import shortened

_log = logging.getLogger("npu_device")

SHOWN_VARIABLES = 4
SHOWN_RANKS = 16

DIFFERENT_START = "the ranks begin training with different values of %s%s"
BROADCAST = (
    "\nLikely cause: no broadcast, a layer that was built after it, or another seed on each rank.\nWhat to do: build "
    "the whole model, and call npu.distribute.broadcast(model.variables) before the first step."
)

Digest = tuple[tuple[int, ...], str, int]  # shape, dtype and checksum of a value


def digest_of(value: Any) -> Digest:
    array = array_of(value)
    return tuple(array.shape), array.dtype.name, checksum(array)


def array_of(value: Any) -> np.ndarray:
    """Return an array, or what becomes a tensor with a value, as an array."""
    # A function that a graph calls gets a number as a scalar of numpy.
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    return compat.to_array(tf.convert_to_tensor(value))


def checksum(value: Any, previous: int = 0) -> int:
    """Return a checksum of an array, or of what becomes a tensor with a value; ``previous`` is the checksum of the data
    that come before it.
    """
    # Copied if it has gaps, which ``view`` below refuses.
    array = np.ascontiguousarray(array_of(value))
    # An array of objects holds strings.
    if array.dtype == object:
        content: Any = repr(array.tolist()).encode()
    else:
        content = array.reshape(-1).view(np.uint8).data
    return zlib.crc32(content, previous)


def variable_name(variable: Any) -> str:
    """Return the name of a variable with that of its model or layer."""
    return str(getattr(variable, "path", None) or variable.name)


def named(names: Sequence[str]) -> str:
    return shortened(names, SHOWN_VARIABLES)


def differences(
    cluster: Cluster, ranks: Sequence[int], names: Sequence[str], values: Sequence[Sequence]
) -> tuple[list[int], str]:
    """Return the positions of variables whose values (of each rank, in order) differ, and a text; "" if none do."""
    positions = []
    for position, values_of_ranks in enumerate(zip(*values)):
        if len(set(values_of_ranks)) > 1:
            positions.append(position)
    if not positions:
        return [], ""
    different = [names[position] for position in positions]
    texts = {}
    for rank, rank_values in zip(ranks, values):
        value = rank_values[positions[0]]
        if isinstance(value, int):
            value = f"digest {value:08x}"
        texts[rank] = f"{value} of {different[0]}"
    title = f"{len(positions)} of {len(names)} variables ({named(different)}):"
    lines = cluster.lines(texts, SHOWN_RANKS)
    return positions, "\n".join([title, *lines])


def common_differences(
    cluster: Cluster, names: Mapping[str, str], checksums: Sequence[Mapping[str, int]]
) -> str:
    """Return a text about variables that all ranks have, and whose checksums differ; "" if none do. Names and checksums
    are by what the ranks call a variable.
    """
    common = [key for key in names if all(key in by_key for by_key in checksums)]
    rows = [[by_key[key] for key in common] for by_key in checksums]
    common_names = [names[key] for key in common]
    return differences(cluster, range(cluster.world_size), common_names, rows)[1]


def different_start(
    job: Job, name: str, names: Sequence[str], remedy: str, *checksums: Sequence[int]
) -> str:
    """Post checksums of variables at some times. The last rank warns of those that never were equal, or returns the
    text of an error, if the user has asked for one; otherwise "".
    """
    mode = environment.NPU_DEVICE_UNEQUAL_START.get()
    if mode == "ignore":
        return ""
    # Only variables that differ at all times are reported: the script has made the others equal.
    differing = posted_differences(job, name, names, checksums, lambda equal: ~equal.any(axis=0))
    if not differing:
        return ""
    text = DIFFERENT_START % (differing, remedy)
    if mode == "error":
        return f"rank {job.cluster.rank}: {text}"
    _log.warning("%s", text)
    return ""


def posted_differences(
    job: Job,
    name: str,
    names: Sequence[str],
    checksums: Sequence[Sequence[int]],
    is_reported: Callable[[np.ndarray], Any],
) -> str:
    """Post checksums of variables at some times; on the last rank, return a text about the values at the first time of
    some variables. ``is_reported`` tells for each variable, given whether the ranks were equal by time and variable.
    Otherwise "".
    """
    rows = []
    # The next collective raises the error of a lost rank.
    with contextlib.suppress(ClusterError):
        rows = job.control.post(name, list(map(list, checksums)))
    if not rows or any(len(row[0]) != len(names) for row in rows):
        return ""
    # By rank, time and variable.
    posted = np.array(rows)
    reported = is_reported((posted == posted[0]).all(axis=0))
    # Variables that aren't reported get 0, by which they compare as equal.
    compared = np.where(reported, posted[:, 0], 0).tolist()
    return differences(job.cluster, range(len(rows)), names, compared)[1]
