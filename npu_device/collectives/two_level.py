"""Groups that span hosts: each host reduces in shared memory, one rank a host talks to the others, and the result is
spread on the host. What goes over the network is what one rank a host needs.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def all_reduce(
    runtime: Runtime, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[list[tf.Tensor]]:
    """As ``backend.all_reduce``. The mean is taken by the ranks between the hosts, of whole sums."""
    host, between = _levels(runtime, group)
    if reduction == "mean" and segments[0][0].dtype.is_integer:
        dtype = mean_dtype(segments[0][0].dtype)
        segments = [[tf.cast(tensor, dtype) for tensor in segment] for segment in segments]
    merge = "sum" if reduction == "mean" else reduction
    results = []
    for segment in segments:
        values = [shared_memory.reduce(runtime, tensor, merge, 0, host) for tensor in segment]
        if between is not None:
            [values] = tensorflow_backend.all_reduce(runtime, [values], merge, between, wire)
            if reduction == "mean":
                values = [value * tf.cast(1.0 / group.size, value.dtype) for value in values]
        results.append(shared_memory.broadcast(runtime, values, 0, host))
    return results


def reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, root: int, group: Group) -> tf.Tensor:
    """As ``backend.reduce``; to all, since that is what TensorFlow has between hosts."""
    del root
    [[reduced]] = all_reduce(runtime, [[tensor]], reduction, group, None)
    return reduced


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
