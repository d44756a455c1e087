"""The engines: what each has to offer, and how those are made that move arrays; one of them divides calls between
hosts.

The operations need nothing else of an engine. The ranks have agreed on a call before an engine gets it, or agree with
its first data (``terms``). Everything works eagerly and in graphs; in a graph a call waits for its own tensors only,
and ranks may reach calls of different groups in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.dtypes import Tensors, Wire, reduced_dtype, sum_dtype, wire_dtype
from npu_device._src.collectives.engines.host.host_engine import HostEngine
from npu_device._src.collectives.engines.host.memory_ring import Layout, MemoryRing
from npu_device._src.collectives.engines.host.mpi_messages import MpiMessages
from npu_device._src.collectives.engines.host.sharing import FIRST_BYTE, connect
from npu_device._src.collectives.engines.host.sockets import SmallMessages, SocketMesh
from npu_device._src.collectives.engines.tensorflow import engine as tensorflow
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job


class Backend(Protocol):
    """What an engine does for a group. In a graph each call, and each segment, waits only for its own tensors."""

    def all_reduce(
        self, agreement: Agreement, segments: Sequence[Tensors], reduction: str, group: Group, wire: Wire
    ) -> list[list[tf.Tensor]]:
        """Reduce segments, lists of tensors of one dtype; return the results of each, the same bits on every rank.

        A backend that compares calls with the data takes the agreement's terms. A mean is over all ranks that the
        members stand for (``Group.counts``). float32 and float64 tensors are sent in the dtype ``wire``; sums are exact
        to float32 either way, and never infinite if the true sum is finite.
        """

    def reduce(
        self, agreement: Agreement, tensors: Tensors, reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        """Reduce tensors of one dtype to one rank; the other ranks get values of the result's shapes and dtype."""

    def broadcast(self, agreement: Agreement, tensors: Tensors, root: int, group: Group) -> list[tf.Tensor]:
        """Return the tensors of the root on every rank; any dtypes, the same shapes and dtypes everywhere."""

    def all_gather(self, agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
        """Return all ranks' rows on every rank: [n] in, [group.size, n] out; n is the same on all ranks."""

    def all_to_all(self, agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out."""


# Engines that move arrays


_BACKGROUND_FROM_BYTES = 256 << 10


def _ring_of(job: Job, group: Group) -> MemoryRing:
    memory, settle = connect(job, group, Layout(group.size).bytes)
    check = job.health.require_running
    return MemoryRing(memory, group.size, group.rank, check, FIRST_BYTE, settle, job.has_own_core)


def _background_from(job: Job) -> int:
    # Long operations proceed while TensorFlow computes, unless they would take its only core from it.
    return _BACKGROUND_FROM_BYTES if job.cores > 1 else sys.maxsize


shared_memory = HostEngine(_ring_of, _background_from)
messages = HostEngine(SmallMessages, lambda _: sys.maxsize)
"""Calls on little data, and the comparison of all others, between hosts."""

# These send segments in the background, whatever their size: TensorFlow computes meanwhile.
mpi = HostEngine(MpiMessages, lambda _: 0)
tcp = HostEngine(SocketMesh, lambda _: 0)
BETWEEN_HOSTS: dict[str, Backend] = {"nccl": tensorflow, "mpi": mpi, "tensorflow": tensorflow, "tcp": tcp}
"""The backends by their names in ``NPU_DEVICE_BACKEND``; tensors that NCCL can't reduce take TensorFlow's ring."""


# Two levels


class TwoLevelBackend:
    """The first three calls for groups that span hosts: each host reduces in shared memory, only one rank per host
    communicates with the others, and each host spreads the result. The network carries what one rank per host needs.
    """

    def __init__(self, between: Backend) -> None:
        self._between = between

    def all_reduce(
        self, agreement: Agreement, segments: Sequence[Tensors], reduction: str, group: Group, wire: Wire
    ) -> list[list[tf.Tensor]]:
        """Reduce segments. A segment is spread within the hosts after the next one has started between them: the
        operations in shared memory run in order, and would otherwise keep the next segment waiting for the network.
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
        self, agreement: Agreement, segment: Tensors, reduction: str, group: Group, wire: Wire
    ) -> list[tf.Tensor]:
        """Return the results of a segment on the lowest rank of each host, and values of their shapes on the others.
        The ranks between the hosts take the mean, of whole sums.
        """
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
        self, agreement: Agreement, tensors: Tensors, reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        del root  # all ranks get the results
        [reduced] = self.all_reduce(agreement, [tensors], reduction, group, None)
        return reduced

    def broadcast(self, agreement: Agreement, tensors: Tensors, root: int, group: Group) -> list[tf.Tensor]:
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


TWO_LEVEL = {name: TwoLevelBackend(engine) for name, engine in BETWEEN_HOSTS.items()}
