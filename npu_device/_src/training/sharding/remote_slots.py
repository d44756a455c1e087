"""The mark of a slot that one rank holds; and how the others read it, from the thread in which its owner answers.

No rank makes the next update before all ranks join its reduction. So between two updates of a rank, the owners of all
slots have made the same number of updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.bytes_on_request import BytesOnRequest, Key
from npu_device._src.collectives.job import Job
from npu_device._src.world.world import World


class Share:
    """The owner of a slot, and whether its value has gone to it; an attribute of the optimizer's variable.

    Attributes:
        owner: the rank of the job.
        is_apart: only the owner has the value; before, at the first step, all ranks have.
    """

    def __init__(self, slots: OptimizerSlots, place: int, owner: int) -> None:
        self.owner = owner
        self.is_apart = False
        self._slots = slots
        self._place = place

    def read(self, variable: Any) -> tf.Tensor:
        """Return the value of a slot that another rank holds."""
        return self._slots.fetch(self._place, variable, self.owner)

    def assign(self, variable: Any, value: Any) -> None:
        """Leave a value to the owner, which is assigned the same one: every rank loads a file."""


def mark(variable: Any, share: Share) -> None:
    vars(variable)[compat.SHARE] = share


class OptimizerSlots:
    """The slots of one optimizer, in the same order on every rank."""

    def __init__(self, job: Job, optimizer: Any) -> None:
        self.variables: list[Any] = []
        self._job = job
        self._optimizer = weakref.ref(optimizer)
        self._exchange = job.part(SlotExchange)
        if self._exchange is None:
            self._exchange = SlotExchange(job)
            job.add(self._exchange)
        self._number = self._exchange.add(self)

    def add(self, slot: Any, owner: int) -> None:
        mark(slot, Share(self, len(self.variables), owner))
        self.variables.append(slot)

    @property
    def updates(self) -> int:
        """Return how many updates the optimizer has made; -1 if it is gone."""
        optimizer = self._optimizer()
        return -1 if optimizer is None else int(optimizer.iterations.numpy())

    def own_bytes(self, place: int) -> Optional[memoryview]:
        """Return the value of a slot that this rank holds; None for another one."""
        if not 0 <= place < len(self.variables) or not compat.has_memory(self.variables[place]):
            return None
        array = compat.to_array(compat.inner_variable(self.variables[place]).read_value())
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def fetch(self, place: int, variable: Any, owner: int) -> tf.Tensor:
        """Return the value of a slot that another rank holds, after the same number of updates as here."""
        cluster = self._job.cluster
        what = f"rank {cluster.rank}: {variable.path}, which only rank {owner} holds (shard_optimizer=True), "
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{what}is read in a function, where it can't be fetched.\nWhat to do: read it in eager mode, between "
                "two steps; or leave out shard_optimizer=True."
            )
        assert self._exchange is not None
        data = self._exchange.bytes_on_request.fetch(owner, (self._number, place, self.updates))
        kind = tf.as_dtype(variable.dtype)
        size = kind.size * int(np.prod(tuple(variable.shape)))
        if data is None or len(data) != size:
            raise RuntimeError(
                f"{what}can't be read now: that rank has made a different number of updates.\nWhat to do: read and "
                "save the state of the optimizer between two steps, on rank 0 or on every rank."
            )
        array = np.frombuffer(data, kind.as_numpy_dtype).reshape(tuple(variable.shape))
        return tf.constant(array)


class SlotExchange:
    """The slots of all optimizers of this rank, for the others; a part of the job."""

    def __init__(self, job: Job) -> None:
        self._optimizers: list[weakref.ref[OptimizerSlots]] = []
        self.bytes_on_request = BytesOnRequest(
            job.cluster, job.health, job.store, job.peers, self._answer, self._everything
        )

    def add(self, slots: OptimizerSlots) -> int:
        """Note an optimizer, and return its number, the same on every rank."""
        self._optimizers.append(weakref.ref(slots))
        return len(self._optimizers) - 1

    def close(self) -> None:
        self.bytes_on_request.close()

    def _answer(self, key: Key) -> Optional[memoryview]:
        number, place, updates = key
        # The optimizer may be gone on this rank, or not be made yet.
        slots = self._optimizers[number]() if number < len(self._optimizers) else None
        if slots is None or slots.updates != updates:
            return None
        return slots.own_bytes(place)

    def _everything(self) -> Iterator[tuple[Key, memoryview]]:
        for number, reference in enumerate(self._optimizers):
            slots = reference()
            if slots is None:
                continue
            for place, variable in enumerate(slots.variables):
                data = slots.own_bytes(place)
                if data is not None and getattr(variable, compat.SHARE).is_apart:
                    yield (number, place, slots.updates), data


def without_initial_slots(world: World, variables: Sequence[Any], root_rank: int) -> list[Any]:
    """Return variables without the slots of divided updates that the root neither owns nor has another value for than
    the initial one, which their owners have, too; every rank makes the call.
    """
    slots = [place for place, variable in enumerate(variables) if compat.is_share(variable)]
    if not slots:
        return list(variables)
    # A loaded file has given them memory; else they have none where they aren't owned.
    here = [place for place in slots if compat.has_memory(variables[place])]
    root = world.group.ranks[root_rank]
    of_root = [place for place in here if getattr(variables[place], compat.SHARE).owner != root]
    sent = set(world.object_from_root(of_root, root_rank))
    return [
        variable
        for place, variable in enumerate(variables)
        if place in sent or not compat.is_share(variable)
    ]
