"""Groups that span hosts: each host reduces in shared memory, one rank a host talks to the others, and the result is
spread on the host. What goes over the network is what one rank a host needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Callable

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives.dtypes import mean_dtype
from npu_device.collectives.group import Group
from npu_device.collectives.shared_memory import backend as shared_memory
from npu_device.collectives.shared_memory.host import hosts_of
from npu_device.collectives.tensorflow_backend import backend as tensorflow_backend


def has_levels(runtime: Runtime, group: Group) -> bool:
    """Whether some ranks of the group share memory, and some don't."""
    hosts = len({hosts_of(runtime).leaders[rank] for rank in group.ranks})
    return 1 < hosts < group.size


def start_all_reduce(
    runtime: Runtime, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[Callable[[], list[tf.Tensor]]]:
    """As ``backend.start_all_reduce``. The mean is taken by the ranks between the hosts, of whole sums."""
    return [partial(_all_reduce, runtime, segment, reduction, group, wire) for segment in segments]


def _all_reduce(
    runtime: Runtime, segment: Sequence[tf.Tensor], reduction: str, group: Group, wire: tf.DType | None
) -> list[tf.Tensor]:
    host, between = _levels(runtime, group)
    values = list(segment)
    if reduction == "mean":
        values = [tf.cast(value, mean_dtype(value.dtype)) for value in values]
    merge = "sum" if reduction == "mean" else reduction
    values = shared_memory.reduce(runtime, values, merge, 0, host)
    if between is not None:
        [finish] = tensorflow_backend.start_all_reduce(runtime, [values], merge, between, wire)
        values = finish()
        if reduction == "mean":
            values = [value * tf.cast(1.0 / group.size, value.dtype) for value in values]
    return shared_memory.broadcast(runtime, values, 0, host)


def reduce(runtime: Runtime, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group) -> list[tf.Tensor]:
    """As ``shared_memory.backend.reduce``; to all, since that is what TensorFlow has between hosts."""
    del root
    return _all_reduce(runtime, tensors, reduction, group, None)


def broadcast(runtime: Runtime, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
    """As ``backend.broadcast``: to the lowest rank of the root's host, between hosts, and on every host."""
    leaders = hosts_of(runtime).leaders
    host, between = _levels(runtime, group)
    source = group.ranks[root]
    values = list(tensors)
    if leaders[source] == leaders[group.ranks[group.rank]] and source != host.ranks[0]:
        values = shared_memory.broadcast(runtime, values, host.ranks.index(source), host)
    if between is not None:
        first = next(rank for rank in between.ranks if leaders[rank] == leaders[source])
        values = tensorflow_backend.broadcast(runtime, values, between.ranks.index(first), between)
    return shared_memory.broadcast(runtime, values, 0, host)


def _levels(runtime: Runtime, group: Group) -> tuple[Group, Group | None]:
    """This rank's part of the group that shares memory, and the lowest ranks of all such parts, if it is one."""
    leaders = hosts_of(runtime).leaders
    me = group.ranks[group.rank]
    parts: dict[int, list[int]] = {}
    for rank in group.ranks:
        parts.setdefault(leaders[rank], []).append(rank)
    mine = tuple(parts[leaders[me]])
    host = Group(f"{group.name}/host", mine, mine.index(me))
    if me != mine[0]:
        return host, None
    first = tuple(sorted(ranks[0] for ranks in parts.values()))
    return host, Group(f"{group.name}/between hosts", first, first.index(me))
