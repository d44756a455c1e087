"""Checksums of values, and a text about those that differ between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.job import Job
from npu_device._src.wording import shortened

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


def checksum(value: Any, previous: int = 0) -> int:
    """Return a checksum of a tensor or an array; ``previous`` is the checksum of the data that come before it."""
    if tf.is_tensor(value):
        value = compat.to_array(value)
    # Copied if it has gaps, which ``view`` below refuses.
    array = np.ascontiguousarray(value)
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
) -> tuple[list[int], str] | None:
    """Return the positions of variables whose values (of each rank, in order) differ, and a text; None if none do."""
    positions = []
    for position, values_of_ranks in enumerate(zip(*values)):
        if len(set(values_of_ranks)) > 1:
            positions.append(position)
    if not positions:
        return None
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


def different_start(
    job: Job, name: str, names: Sequence[str], remedy: str, *checksums: Sequence[int]
) -> str | None:
    """Post checksums of variables at some times; on the last rank, return a text about those that never were equal."""
    rows = _rows_of_all(job, name, names, checksums)
    # Only variables that differ at all times are reported: the script has made the others equal.
    text = _text_of(job, names, rows, lambda are_equal: not any(are_equal))
    if text is None:
        return None
    return DIFFERENT_START % (text, remedy)


def drifted(
    job: Job, name: str, names: Sequence[str], earlier: Sequence[int], latest: Sequence[int]
) -> str | None:
    """Post checksums of variables; on the last rank, return a text about variables that were equal earlier and differ
    in the latest ones, if any do.
    """
    rows = _rows_of_all(job, name, names, (latest, earlier))
    # Variables that differed earlier were reported then.
    return _text_of(job, names, rows, lambda are_equal: are_equal == [False, True])


# The checksums of a rank at some times, by variable.
_Row = Sequence[Sequence[int]]


def _rows_of_all(
    job: Job, name: str, names: Sequence[str], checksums: Sequence[Sequence[int]]
) -> list[_Row]:
    """Post checksums of variables at some times; return those of all ranks on the last one, [] on the others."""
    try:
        own_row = list(map(list, zip(*checksums)))
        rows = job.control.post(name, own_row)
    except ClusterError:
        # The next collective raises the error of a lost rank.
        return []
    if any(len(row) != len(names) for row in rows):
        return []
    return rows


def _text_of(
    job: Job, names: Sequence[str], rows: Sequence[_Row], is_reported: Callable[[list[bool]], bool]
) -> str | None:
    """Return a text about the values at the first time of some variables, of which ``is_reported`` decides, given
    whether the ranks were equal at each time.
    """
    reported = []
    # A column has a variable's checksums on each rank, at all times.
    for column in zip(*rows):
        are_equal = [len(set(ranks)) == 1 for ranks in zip(*column)]
        reported.append(is_reported(are_equal))
    compared = []
    for row in rows:
        # Variables that aren't reported get 0, by which they compare as equal.
        compared.append([times[0] if is_apart else 0 for times, is_apart in zip(row, reported)])
    difference = differences(job.cluster, range(len(rows)), names, compared)
    if difference is None:
        return None
    return difference[1]
