"""How many transfers of each group this rank has begun and ended, for the stall watch and the table of missing ranks.

A collective takes a transfer for each of its segments. Transfers are counted, since a rank may end between two of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Union

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.health import GroupId
from npu_device._src.collectives.call import Row, Terms
from npu_device._src.collectives.group import Group, GroupTable

Position = dict[str, Any]
"""How many transfers of a group a rank has begun, whether it waits in one, and the row of its call."""

_LARGEST = 0x7FFFFFFF
_MOST_DESTROYED = 100  # groups whose number of transfers is remembered
_TRANSFER = {"collective": "a transfer of data", "line": "TensorFlow's engine"}


class HostTransferCount:
    """How many transfers of a group this rank has begun and ended, of those that Python moves."""

    def __init__(self, started: int = 0) -> None:
        self.started = started
        self._ended = started
        self._row: Callable[[], Row | None] = lambda: None

    def begin(self, terms: Terms) -> int:
        """Note a transfer, with ``AGREED`` as part of the last call; return its position in the group."""
        self.started += 1
        if terms.row is not None:
            self._row = terms.row
        return self.started - 1

    def end(self) -> None:
        self._ended += 1

    @property
    def is_waiting(self) -> bool:
        return self.started > self._ended

    def position(self) -> Position:
        return {"begun": self.started, "waiting": self.is_waiting, "call": self._row()}


class TensorFlowTransferCount:
    """A count of TensorFlow's transfers: the ranks have agreed on a call, and one of them may stop amid its data."""

    def __init__(self, device: str) -> None:
        self._device = device
        with tf.init_scope(), tf.device(self._device):
            self._started = compat.plain_variable(tf.constant(0, tf.int32))
            self._ended = compat.plain_variable(tf.constant(0, tf.int32))

    def begin(self, tensor: tf.Tensor) -> None:
        self._count(self._started, tensor)

    def end(self, result: tf.Tensor) -> None:
        self._count(self._ended, result)

    def _count(self, variable: Any, after: tf.Tensor) -> None:
        """Note that a tensor to be sent, or a result, is ready. Nothing waits for the note."""
        with tf.control_dependencies([after]), tf.device(self._device):
            counter = compat.through_outer_graphs(variable.handle)
            tf.raw_ops.ResourceCountUpTo(resource=counter, limit=_LARGEST, T=tf.int32)

    def position(self) -> Position:
        # The stall watch may run while another thread builds a graph.
        with compat.eager_mode():
            ended = int(self._ended)
            # Read last, so that the start is never behind the end.
            started = int(self._started)
        return {"begun": started, "waiting": started > ended, "call": _TRANSFER}


Count = Union[HostTransferCount, TensorFlowTransferCount]


class CallCounts:
    """The counts of all groups of this rank, each made at its first use."""

    def __init__(self) -> None:
        self._calls = GroupTable[HostTransferCount]()
        self._transfers = GroupTable[TensorFlowTransferCount]()
        # Transfers of the groups that were destroyed last. The others may use them a little longer, and the same group
        # may be made again.
        self._destroyed: dict[Group, int] = {}

    def of(self, group: Group) -> HostTransferCount:
        """Return the count of the transfers of a group that Python moves."""
        return self._calls.of(group, lambda group: HostTransferCount(self._destroyed.pop(group, 0)))

    def transfers_of(self, group: Group, device: str) -> TensorFlowTransferCount:
        """Return the count of a group's transfers through TensorFlow, kept on the CPU of this rank."""
        # The stall watch tells them by a name of their own from the transfers that Python moves.
        transfers = replace(
            group, name=f"{group.name}/transfers", parent=group.parent or group.name
        )
        return self._transfers.of(transfers, lambda _: TensorFlowTransferCount(device))

    def started(self) -> dict[GroupId, int]:
        """Return how many transfers have begun in each group, destroyed ones included. TensorFlow's are left out:
        reading their number takes an eager operation.
        """
        counts = list(self._destroyed.items())
        counts += [(group, count.started) for group, count in list(self._calls.items())]
        return {(group.name, group.ranks): started for group, started in counts}

    def waiting(self) -> dict[GroupId, int]:
        """Return the same of the groups in which this rank waits in a transfer."""
        calls = list(self._calls.items())
        return {
            (group.name, group.ranks): count.started for group, count in calls if count.is_waiting
        }

    def of_all(self) -> list[tuple[Group, Count]]:
        """Return the groups with their counts."""
        # A copy is returned, since other threads add groups meanwhile.
        return [*self._calls.items(), *self._transfers.items()]

    def forget(self, name: str) -> None:
        """Drop the counts of a group, and of the groups made for its calls."""
        self._transfers.forget(name)
        for group, count in self._calls.forget(name).items():
            self._destroyed[group] = count.started
        while len(self._destroyed) > _MOST_DESTROYED:
            del self._destroyed[next(iter(self._destroyed))]
