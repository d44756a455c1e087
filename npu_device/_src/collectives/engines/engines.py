"""The engines of a job: what each has to offer, and one that divides calls between hosts.

Collectives need nothing else of an engine. The ranks have agreed on a call before an engine gets it, or agree with
its first data (``terms``). Everything works eagerly and in graphs; in a graph a call waits for its own tensors only,
and ranks may reach calls of different groups in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional, TypeVar, Union

import tensorflow as tf

from npu_device._src.collectives.call import AGREED, Terms
from npu_device._src.collectives.dtypes import (
    TensorList,
    Tensors,
    TensorsOrSpecs,
    Wire,
    reduced_dtype,
    sum_dtype,
    wire_dtype,
)
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host.channel import Channel
from npu_device._src.collectives.engines.host.host_engine import GraphOrders, HostEngine
from npu_device._src.collectives.engines.host.memory_ring import Layout, MemoryRing
from npu_device._src.collectives.engines.host.mpi_messages import MpiMessages
from npu_device._src.collectives.engines.host.pair_transfers import PairQueue, Pairs
from npu_device._src.collectives.engines.host.queue import HostQueue
from npu_device._src.collectives.engines.host.sharing import FIRST_BYTE, connect
from npu_device._src.collectives.engines.host.sockets import SmallMessages, SocketMesh
from npu_device._src.collectives.engines.tensorflow.engine import TensorFlowEngine
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.hosts_of_job import JobHosts

# Two levels


@dataclass(frozen=True, eq=False)
class TwoLevelEngine:
    """An engine for groups that span hosts: each host reduces in shared memory, only one rank per host communicates
    with the others, and each host spreads the result. The network carries what one rank per host needs.

    Rows that all ranks need of all others have one level.
    """

    _hosts: JobHosts
    _within: HostEngine
    _between: LevelEngine

    def all_reduce(
        self,
        segments: Sequence[Tensors],
        reduction: str,
        group: Group,
        wire: Wire,
        terms: Terms = AGREED,
        root: int | None = None,
    ) -> list[TensorList]:
        """Reduce segments to all ranks: for a root alone, only the last broadcast would be saved."""
        host, _ = self._levels(group)
        reduced = (self._reduce(segment, reduction, group, wire) for segment in segments)
        return _one_later(reduced, partial(self._from_lowest_rank, host))

    def reduce_to_owners(
        self,
        segments: Sequence[Tensors],
        owners: Sequence[Sequence[int]],
        reduction: str,
        group: Group,
        wire: Wire,
        terms: Terms = AGREED,
    ) -> list[TensorList]:
        """Reduce segments to the owners of their tensors; see ``HostEngine``. Between hosts, the tensors of a host go
        to its lowest rank.
        """
        host, _ = self._levels(group)

        def reduce(segment: Tensors, owners_there: Sequence[int]) -> tuple[TensorList, list[int]]:
            """Return what belongs to this host, and the owners."""
            lowest_ranks = self._lowest_ranks_of(group, owners_there)
            local = [
                owner for owner, rank in zip(owners_there, lowest_ranks) if rank == host.ranks[0]
            ]
            owned = self._reduce(segment, reduction, group, wire, lowest_ranks)
            return owned, [group.ranks[owner] for owner in local]

        def spread(reduced: tuple[TensorList, list[int]]) -> TensorList:
            tensors, owners_there = reduced
            # Only tensors that other ranks own are spread: the lowest rank has its own ones already.
            sent = [position for position, rank in enumerate(owners_there) if rank != host.ranks[0]]
            if sent:
                received = self._from_lowest_rank(host, [tensors[position] for position in sent])
                for position, tensor in zip(sent, received):
                    tensors[position] = tensor
            rank = group.ranks[group.rank]
            return [tensor for tensor, owner in zip(tensors, owners_there) if owner == rank]

        return _one_later(map(reduce, segments, owners), spread)

    def broadcast(
        self, tensors: TensorsOrSpecs, owners: Sequence[int], group: Group, terms: Terms = AGREED
    ) -> TensorList:
        """Send tensors from their owners to all ranks; see ``HostEngine``. Each host sends what its ranks own once."""
        host, between = self._levels(group)
        lowest_ranks = self._lowest_ranks_of(group, owners)
        local = [position for position, rank in enumerate(lowest_ranks) if rank == host.ranks[0]]
        remote = [position for position, rank in enumerate(lowest_ranks) if rank != host.ranks[0]]
        results = list(tensors)

        def spread(positions: list[int], owners_there: list[int]) -> None:
            if positions:
                sent = [results[position] for position in positions]
                received = self._within.broadcast(sent, owners_there, host)
                for position, tensor in zip(positions, received):
                    results[position] = tensor

        spread(local, [host.ranks.index(group.ranks[owners[position]]) for position in local])
        if between is not None:
            hosts = list(map(between.ranks.index, lowest_ranks))
            results = self._between.broadcast(results, hosts, between)
        # Only the lowest rank of a host has got what comes from other hosts.
        spread(remote, [0] * len(remote))
        return results

    def _from_lowest_rank(self, host: Group, tensors: Tensors) -> TensorList:
        """Spread the tensors of the lowest rank of the host on it."""
        return self._within.broadcast(tensors, [0] * len(tensors), host)

    def _hosts_of(self, group: Group) -> dict[int, list[int]]:
        """Return the members on each host, in their order."""
        hosts: dict[int, list[int]] = {}
        for rank in group.ranks:
            hosts.setdefault(self._hosts.leaders[rank], []).append(rank)
        return hosts

    def _lowest_ranks_of(self, group: Group, members: Sequence[int]) -> list[int]:
        """Return the lowest rank of the host of each member."""
        hosts = self._hosts_of(group)
        return [hosts[self._hosts.leaders[group.ranks[member]]][0] for member in members]

    def _reduce(
        self,
        segment: Tensors,
        reduction: str,
        group: Group,
        wire: Wire,
        lowest_ranks: Optional[Sequence[int]] = None,
    ) -> TensorList:
        """Return the results of a segment on the lowest rank of each host, and values of their shapes on the others.
        The ranks between the hosts take the mean, of whole sums.

        With ``lowest_ranks``, the rank between the hosts to which each tensor goes, return the results of this host's
        tensors.
        """
        host, between = self._levels(group)
        dtype = reduced_dtype(segment[0].dtype, reduction)
        # A host's sum keeps the precision and range of the dtype it is added in; it is sent as narrow as one rank's
        # values.
        sums = [tf.cast(tensor, sum_dtype(dtype)) for tensor in segment]
        within_reduction = reduction
        if reduction == "mean":
            within_reduction = "sum"
        [sums] = self._within.all_reduce([sums], within_reduction, host, None, root=0)
        if between is not None:
            sent_dtype = None
            if reduction in ("sum", "mean") and wire_dtype(dtype, wire) != sums[0].dtype:
                sent_dtype = wire_dtype(dtype, wire)
            if lowest_ranks is None:
                [sums] = self._between.all_reduce([sums], reduction, between, sent_dtype)
            else:
                assert isinstance(self._between, HostEngine), "the caller asks has_owners first"
                owners = list(map(between.ranks.index, lowest_ranks))
                [sums] = self._between.reduce_to_owners(
                    [sums], [owners], reduction, between, sent_dtype
                )
        elif lowest_ranks is not None:
            sums = [tensor for tensor, rank in zip(sums, lowest_ranks) if rank == host.ranks[0]]
        return [tf.cast(tensor, dtype) for tensor in sums]

    def _levels(self, group: Group) -> tuple[Group, Group | None]:
        """Return the ranks of the group that share memory with this one; and the lowest ranks of all hosts, if it is
        one of them.
        """
        leaders = self._hosts.leaders
        rank = group.ranks[group.rank]
        hosts = self._hosts_of(group)
        neighbours = tuple(hosts[leaders[rank]])
        # The parent name lets ``forget`` find this group when the whole group is destroyed.
        host = Group(f"{group.name}/host", neighbours, neighbours.index(rank), group.name)
        # Only the lowest rank of a host communicates with other hosts.
        if rank != neighbours[0]:
            return host, None
        lowest_ranks = tuple(sorted(ranks[0] for ranks in hosts.values()))
        # A mean divides by all ranks, so each leader has to count for the ranks of its host.
        counts = tuple(len(hosts[leaders[member]]) for member in lowest_ranks)
        between = Group(
            f"{group.name}/between hosts",
            lowest_ranks,
            lowest_ranks.index(rank),
            group.name,
            counts=counts,
        )
        return host, between


_Reduced = TypeVar("_Reduced")


def _one_later(
    reduced: Iterable[_Reduced], spread: Callable[[_Reduced], TensorList]
) -> list[TensorList]:
    """Spread each segment within the hosts after the next one has started between them: the transfers in shared memory
    run in order, and would otherwise keep the next segment waiting for the network.
    """
    results: list[TensorList] = []
    waiting: list[_Reduced] = []
    for segment in reduced:
        results += map(spread, waiting)
        waiting = [segment]
    return [*results, *map(spread, waiting)]


LevelEngine = Union[HostEngine, TensorFlowEngine]
"""What moves rows that all ranks need of all others, and what moves data on a level or between hosts."""

Engine = Union[LevelEngine, TwoLevelEngine]
"""What moves data for a group; ``HostEngine`` tells what each call does. In a graph each call, and each segment, waits
only for its own tensors.

An engine that compares calls with the data sends ``terms`` with its first transfer; by default, the ranks have agreed
before.
"""


# The engines of a job


Connect = Callable[[EngineContext, Group], Channel]

_BACKGROUND_FROM_BYTES = 256 << 10


def _ring_of(context: EngineContext, group: Group) -> MemoryRing:
    memory, withdraw_offer = connect(context, group, Layout(group.size).bytes)
    check = context.health.require_running
    return MemoryRing(
        memory, group.size, group.rank, check, FIRST_BYTE, withdraw_offer, context.has_own_core
    )


def _queue_of(
    context: EngineContext, connect: Connect, background_from: int, group: Group
) -> HostQueue:
    """Return the queue of a group, given what makes its channel when its first transfer runs, and from how many bytes a
    transfer goes to the background.
    """
    # Long transfers proceed while TensorFlow computes, unless they would take its only core from it. Those that always
    # go to the background (0) mostly wait for the network.
    if context.cores == 1 and background_from:
        background_from = sys.maxsize
    channel = partial(connect, context, group)
    return HostQueue(channel, context.counts.of(group), context.buffers, background_from)


class Engines:
    """All engines of this rank of a job.

    Attributes:
        shared_memory: for groups whose ranks share memory.
        messages: for calls on little data, and the comparison of all others, between hosts.
        pairs: for send and receive.
        by_name: those between hosts, by their names in ``NPU_DEVICE_BACKEND``; tensors that NCCL can't reduce take
            TensorFlow's ring.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        graph_orders = GraphOrders(context)

        def engine(connect: Connect, background_from: int) -> HostEngine:
            return HostEngine(graph_orders, partial(_queue_of, context, connect, background_from))

        self.shared_memory = engine(_ring_of, _BACKGROUND_FROM_BYTES)
        self.messages = engine(SmallMessages, sys.maxsize)
        # These send segments in the background, whatever their size: TensorFlow computes meanwhile.
        mpi = engine(MpiMessages, 0)
        tcp = engine(SocketMesh, 0)
        self.pairs = Pairs(graph_orders, partial(PairQueue, context))
        self.tensorflow = TensorFlowEngine(context)
        # The keys are the values of NPU_DEVICE_BACKEND.
        self.by_name: dict[str, LevelEngine] = {
            "nccl": self.tensorflow,
            "mpi": mpi,
            "tensorflow": self.tensorflow,
            "tcp": tcp,
        }
        # The engines that hold something for each group, which has to be freed with it.
        self._on_arrays = (self.shared_memory, self.messages, mpi, tcp, self.pairs)

    def engine_for_tensors(self, group: Group, dtype: tf.DType) -> Engine:
        """Return the engine that reduces and spreads tensors of a dtype in a group, the same on every rank."""
        hosts = self._context.hosts
        engine = self.engine_for_rows(group, dtype)
        # NCCL has levels of its own. On one host, or with each rank alone on its host, one level is all there is.
        if hosts.uses_nccl(dtype) or not 1 < hosts.number_of(group.ranks) < group.size:
            return engine
        return TwoLevelEngine(hosts, self.shared_memory, engine)

    def engine_for_rows(self, group: Group, dtype: tf.DType) -> LevelEngine:
        """Return the engine that gathers and exchanges rows of a dtype: every rank needs those of every other one."""
        hosts = self._context.hosts
        if hosts.uses_nccl(dtype):
            return self.tensorflow
        if hosts.number_of(group.ranks) == 1:
            return self.shared_memory
        return self.by_name[hosts.engine]

    def has_owners(self, group: Group, dtypes: Iterable[tf.DType]) -> bool:
        """Return whether the engine of a group has ``reduce_to_owners`` for some dtypes: in shared memory, and through
        TCP and MPI.
        """
        engines = [self.engine_for_rows(group, dtype) for dtype in dtypes]
        return all(isinstance(engine, HostEngine) for engine in engines)

    def forget(self, name: str) -> None:
        """Free what is held for a group that is destroyed, and for the groups made for its calls."""
        for engine in self._on_arrays:
            engine.forget(name)
