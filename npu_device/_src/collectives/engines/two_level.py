"""Groups that span hosts: each host reduces in shared memory, only one rank per host communicates with the others, and
each host spreads the result. The network carries what one rank per host needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.dtypes import reduced_dtype, sum_dtype, wire_dtype
from npu_device._src.collectives.engines.contract import Backend
from npu_device._src.collectives.engines.host.engines import shared_memory
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job


class TwoLevelBackend:
    """The backend for calls that hosts can divide.

    Args:
        between: the backend of the lowest ranks of all hosts.
    """

    def __init__(self, between: Backend) -> None:
        self._between = between

    def all_reduce(
        self,
        agreement: Agreement,
        segments: Sequence[Sequence[tf.Tensor]],
        reduction: str,
        group: Group,
        wire: tf.DType | None,
    ) -> list[list[tf.Tensor]]:
        """Reduce segments, as ``contract`` says. The ranks between the hosts take the mean, of whole sums.

        A segment is spread within the hosts after the next one has started between them: the operations in shared
        memory run in order, and would otherwise keep the next segment waiting for the network.
        """
        host, _ = _levels(agreement.job, group)
        results: list[list[tf.Tensor]] = []
        between: list[list[tf.Tensor]] = []
        for segment in segments:
            between.append(self._reduce(agreement, segment, reduction, group, wire))
            if len(between) > 1:
                results.append(shared_memory.broadcast(agreement, between.pop(0), 0, host))
        return results + [shared_memory.broadcast(agreement, values, 0, host) for values in between]

    def _reduce(
        self, agreement: Agreement, segment: Sequence[tf.Tensor], reduction: str, group: Group, wire: tf.DType | None
    ) -> list[tf.Tensor]:
        """Return a segment's results on the lowest rank of each host, and values of their shapes on the others."""
        host, between = _levels(agreement.job, group)
        dtype = reduced_dtype(segment[0].dtype, reduction)
        # A host's sum keeps the precision and range of the dtype it is added in; it is sent as narrow as one rank's
        # values.
        values = [tf.cast(value, sum_dtype(dtype)) for value in segment]
        values = shared_memory.reduce(agreement, values, "sum" if reduction == "mean" else reduction, 0, host)
        if between is not None:
            travels = wire_dtype(dtype, wire) if reduction in ("sum", "mean") else None
            travels = None if travels == values[0].dtype else travels
            [values] = self._between.all_reduce(agreement, [values], reduction, between, travels)
        return [tf.cast(value, dtype) for value in values]

    def reduce(
        self, agreement: Agreement, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        """Reduce tensors, as ``contract`` says, but to all ranks."""
        del root
        [reduced] = self.all_reduce(agreement, [tensors], reduction, group, None)
        return reduced

    def broadcast(self, agreement: Agreement, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
        """Broadcast the root's tensors: to the lowest rank of the root's host, between hosts, and on every host."""
        leaders = agreement.job.hosts.leaders
        host, between = _levels(agreement.job, group)
        source = group.ranks[root]
        values = list(tensors)
        if leaders[source] == leaders[group.ranks[group.rank]] and source != host.ranks[0]:
            values = shared_memory.broadcast(agreement, values, host.ranks.index(source), host)
        if between is not None:
            first = next(rank for rank in between.ranks if leaders[rank] == leaders[source])
            values = self._between.broadcast(agreement, values, between.ranks.index(first), between)
        return shared_memory.broadcast(agreement, values, 0, host)


def _levels(job: Job, group: Group) -> tuple[Group, Group | None]:
    """Return this rank's part of the group that shares memory; and the lowest ranks of all parts, if it is one."""
    leaders = job.hosts.leaders
    me = group.ranks[group.rank]
    parts: dict[int, list[int]] = {}
    for rank in group.ranks:
        parts.setdefault(leaders[rank], []).append(rank)
    mine = tuple(parts[leaders[me]])
    host = Group(f"{group.name}/host", mine, mine.index(me), group.name)
    if me != mine[0]:
        return host, None
    first = tuple(sorted(ranks[0] for ranks in parts.values()))
    counts = tuple(len(parts[leaders[rank]]) for rank in first)
    return host, Group(f"{group.name}/between hosts", first, first.index(me), group.name, counts=counts)
