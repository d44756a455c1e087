"""The mark of a slot that one rank holds; and how the others read it and assign it values, by the thread in which its
owner answers.

No rank makes the next update before all ranks join its reduction. So between two updates of a rank, the owners of all
slots have made the same number of updates, or are about to end the last of them. What a rank assigns to a slot of
another one is given to its owner at once, which uses it in the next update: the script of the owner may assign the
same, or an own value.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.bytes_on_request import BytesOnRequest, Key
from npu_device._src.cluster.time_limits import UPDATE_END_SECONDS, UPDATE_POLL_SECONDS
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.threads import ThreadSwitch
from npu_device._src.training.sharding.shares import bytes_of
from npu_device._src.training.watching.digests import digest_of
from npu_device._src.training.watching.same_variables import assign_from_root
from npu_device._src.world.world import World

_ID_BITS = 31  # room for the ids of the optimizers of one group


@dataclass(eq=False)
class SlotShare:
    """The owner of a slot, and whether its value has gone to it; an attribute of the optimizer's variable.

    Attributes:
        owner: the rank of the job.
        is_apart: only the owner has the value; before, at the first step, all ranks have.
        weight: the variable whose moving average the slot is; None for any other slot.
    """

    _slots: OptimizerSlots
    _index: int
    owner: int
    is_apart: bool = False
    weight: Any = None

    @property
    def _slot(self) -> Any:
        return self._slots.variables[self._index]

    def read(self) -> tf.Tensor:
        """Return the value of a slot that another rank holds, after the same number of updates as here."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self}is read in a function, where it can't be fetched.\nWhat to do: read it in eager mode, between "
                "two steps; or leave out shard_optimizer=True."
            )
        slots = self._slots
        key = slots.key_of(self._index)
        fetched = slots.exchange.bytes_on_request.exchange(self.owner, slots.keeper, key)
        if fetched is None or len(fetched) != bytes_of(self._slot):
            raise RuntimeError(
                f"{self}can't be read now: that rank has made a different number of updates.\nWhat to do: read and "
                "save the state of the optimizer between two steps."
            )
        return compat.tensor_of_bytes(fetched, self._slot.dtype, self._slot.shape)

    def read_before_first_step(self, read: Callable[[], Any]) -> Any:
        """Return what ``read`` does. A function in which it is read fails when it runs after the first step."""
        if tf.executing_eagerly():
            return read()
        message = (
            f"{self}is read in a function that was traced before the first step, and has no "
            "value for it.\nWhat to do: read it in eager mode, between two steps; or leave out shard_optimizer=True."
        )
        are_apart = self._slots.are_apart.read_value()
        with tf.control_dependencies([tf.debugging.Assert(~are_apart, [message])]):
            return tf.identity(read())

    def assign(self, new_value: Any) -> None:
        """Give a value to the owner of the slot."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self}is assigned a value in a function, where that can't be sent.\nWhat to do: assign it in eager "
                "mode, between two steps; or leave out shard_optimizer=True."
            )
        tensor = tf.convert_to_tensor(new_value)
        content = compat.bytes_of_tensor(tf.cast(tensor, self._slot.dtype))
        slots = self._slots
        key = slots.key_of(self._index)
        exchange = slots.exchange.bytes_on_request.exchange
        if exchange(self.owner, slots.keeper, key, content) is None:
            raise RuntimeError(
                f"{self}can't be assigned a value now: that rank has no such slot.\nWhat to do: load the state of the "
                "optimizer before its first step, or between two steps; or leave out shard_optimizer=True."
            )

    def __str__(self) -> str:
        rank = self._slots.job.cluster.rank
        path = compat.path_of(self._slot)
        return f"rank {rank}: {path}, which only rank {self.owner} holds (shard_optimizer=True), "

    def note_assigned(self) -> None:
        """Note that the script of the owner has assigned the slot a value."""
        slots = self._slots
        if tf.executing_eagerly() and not slots.updating.is_on:
            slots.assigned_at[self._index] = slots.updates

    def settle(self, root_rank: int) -> None:
        """Take what a rank of the job has assigned to the slot, which all ranks get the values of."""
        self._slots.settle_slot(self._index, root_rank)


class OptimizerSlots:
    """The slots of one optimizer, in the same order on every rank."""

    def __init__(self, job: Job, group: Group) -> None:
        self.variables: list = []
        self.job = job
        self.updating = ThreadSwitch()  # on while an update changes slots, not the script
        self._lock = threading.Lock()
        self._incoming: dict[int, dict[int, bytearray]] = {}  # bytes by slot and by rank
        self.assigned_at: dict[int, int] = {}  # after how many updates the owner's script did
        # Variables, which functions change too when they run.
        with tf.init_scope(), tf.device("CPU:0"):
            self._updates = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._has_incoming = tf.Variable(False, trainable=False)
            self.are_apart = tf.Variable(False, trainable=False)
        self.exchange = job.component_or_new(SlotExchange, job)
        self._group = group
        # The lowest rank of the group has what those hand over that end before it.
        self.keeper = group.ranks[0]
        self._optimizer_id = -1

    def add(self, slot: Any, owner: int) -> None:
        compat.mark(slot, SlotShare(self, len(self.variables), owner))
        self.variables.append(slot)

    @property
    def updates(self) -> int:
        """Return how many divided updates this rank has made."""
        return int(self._updates.numpy())

    def register(self, user: Any) -> None:
        """Get the id by which the ranks know this optimizer, at its first step; see ``SlotExchange.add``."""
        if self._optimizer_id < 0:
            self._optimizer_id = self.exchange.add(self, self._group, user)

    def begin(self) -> None:
        """Note that all ranks of the group have come to the first step of this optimizer."""
        self.exchange.forget_unused(self._optimizer_id)
        with tf.init_scope():
            self.are_apart.assign(True)

    def count_update(self, is_update: tf.Tensor | None = None) -> None:
        """Count an update, if it is one, at once or in the graph that is built."""
        count = tf.constant(1, tf.int64)
        if is_update is not None:
            count = tf.cast(is_update, tf.int64)
        self._updates.assign_add(count)

    def wait_for_update(self, updates: int) -> bool:
        """Wait for the end of the current update; return whether this rank has made just so many updates then."""
        deadline = time.monotonic() + UPDATE_END_SECONDS
        # The rank that asks has ended an update, or a swap, in which this rank still is.
        while updates == self.updates + 1 and time.monotonic() < deadline:
            self.job.health.require_running()
            time.sleep(UPDATE_POLL_SECONDS)
        return updates == self.updates

    def _held(self, index: int) -> Any:
        """Return a slot that this rank holds; None for another one."""
        # The index is from another rank, which may have built another model.
        if 0 <= index < len(self.variables) and compat.has_memory(self.variables[index]):
            return self.variables[index]
        return None

    def own_bytes(self, index: int) -> Optional[memoryview]:
        """Return the value of a slot that this rank holds, or another one has assigned; None for another slot."""
        variable = self._held(index)
        if variable is None:
            return None
        with self._lock:
            incoming = self._incoming.get(index)
            if incoming and self.assigned_at.get(index) != self.updates:
                return memoryview(next(reversed(incoming.values())))
        return compat.bytes_of_tensor(compat.inner_variable(variable).read_value())

    def key_of(self, index: int) -> Key:
        """Return what the ranks name a slot by, after the current number of updates."""
        return (self._optimizer_id, index, self.updates)

    def accept(self, rank: int, index: int, content: bytearray) -> bool:
        """Keep what another rank assigns to a slot of this one, until the next update."""
        variable = self._held(index)
        if variable is None or len(content) != bytes_of(variable):
            return False
        with self._lock:
            incoming = self._incoming.setdefault(index, {})
            # All ranks may load one file: its bytes are kept once, and re-inserted, so that the newest come last.
            equal = next((earlier for earlier in incoming.values() if earlier == content), content)
            incoming.pop(rank, None)
            incoming[rank] = equal
            self._has_incoming.assign(True)
        return True

    def settle(self, after: Sequence[tf.Tensor], is_update: tf.Tensor | None) -> list[tf.Tensor]:
        """Assign what other ranks have given, once some tensors of all ranks are there, if this step makes an update;
        return what to wait for.
        """
        if tf.executing_eagerly():
            if self._has_incoming.numpy() and (is_update is None or is_update):
                self._settle()
            return []
        with tf.control_dependencies(after):
            has_incoming = self._has_incoming.read_value()
            if is_update is not None:
                has_incoming = has_incoming & is_update

        def settle() -> tf.Tensor:
            spec = tf.TensorSpec([], tf.bool)
            [is_settled] = call_now(self._settle, [has_incoming], [spec])
            return is_settled

        return [tf.cond(has_incoming, settle, lambda: has_incoming)]

    def _settle(self, *flag: Any) -> list:
        with self._lock:
            for index, incoming in self._incoming.items():
                # What the owner's script has assigned stays: it makes the same call as the others.
                if self.assigned_at.get(index) == self.updates:
                    continue
                contents = list(incoming.values())
                if any(content != contents[0] for content in contents):
                    rows = [
                        f"  rank {rank}: crc32 {zlib.crc32(incoming[rank]):08x}"
                        for rank in incoming
                    ]
                    listed = "\n".join(rows)
                    raise RuntimeError(
                        f"rank {self.job.cluster.rank}: other ranks have assigned "
                        f"{compat.path_of(self.variables[index])} "
                        f"different values, and only this rank holds it (shard_optimizer=True).\n{listed}\n"
                        "What to do: load the same file on every rank, or on rank 0 alone."
                    )
                self._assign(index, contents[0])
            self._incoming.clear()
            self._has_incoming.assign(False)
        return [np.array(False)]

    def settle_slot(self, index: int, root_rank: int) -> None:
        with self._lock:
            incoming = self._incoming.pop(index, {})
            # Unless the root has assigned anything, it has the owner's value.
            if root_rank in incoming:
                self._assign(index, incoming[root_rank])

    def _assign(self, index: int, content: bytearray) -> None:
        variable = self.variables[index]
        tensor = compat.tensor_of_bytes(content, variable.dtype, variable.shape)
        compat.set_slot(variable, tensor)


class SlotExchange:
    """The slots of all optimizers of this rank, for the others; a component of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next: dict[int, int] = {}  # by group, the next free id
        self._slots: dict[int, OptimizerSlots] = {}
        # An optimizer that is gone here may still be read on a rank that isn't as far in the script.
        self._users: dict[int, weakref.ref[Any]] = {}
        self.bytes_on_request = BytesOnRequest(job.cluster, job.health, job.peers, self)

    def add(self, slots: OptimizerSlots, group: Group, user: Any) -> int:
        """Note an optimizer, and return its id, the same on every rank of the group: they call this at its first
        step, before they compare its variables.

        Args:
            user: the object that updates the slots.
        """
        # Other ranks have other groups: each group numbers its own optimizers.
        text = f"{group.name} {list(group.ranks)}"
        first_id = zlib.crc32(text.encode()) << _ID_BITS
        # Ranks that have disagreed on an earlier optimizer have still made the same number of calls.
        calls = self._job.counts.of(group).started
        optimizer_id = max(first_id + calls, self._next.get(first_id, 0))
        self._next[first_id] = optimizer_id + 1
        self._slots[optimizer_id] = slots
        self._users[optimizer_id] = weakref.ref(user)
        return optimizer_id

    def forget_unused(self, optimizer_id: int) -> None:
        """Free the slots of optimizers that are gone, when all ranks of a group begin to use the optimizer of an id: by
        then, they are gone on each of them.
        """
        for old_id, user in list(self._users.items()):
            if user() is None and old_id >> _ID_BITS == optimizer_id >> _ID_BITS:
                del self._users[old_id]
                del self._slots[old_id]

    def close(self) -> None:
        if self.bytes_on_request.close():
            self._job.serves_others = True

    def accept(self, rank: int, key: Key, content: bytearray) -> bool:
        optimizer_id, index, _ = key
        slots = self._slots.get(optimizer_id)
        return slots is not None and slots.accept(rank, index, content)

    def answer(self, key: Key) -> Optional[memoryview]:
        optimizer_id, index, updates = key
        slots = self._slots.get(optimizer_id)
        if slots is None or not slots.wait_for_update(updates):
            return None
        return slots.own_bytes(index)

    def all_bytes(self) -> Iterator[tuple[int, Key, memoryview]]:
        for optimizer_id, slots in self._slots.items():
            for index, variable in enumerate(slots.variables):
                content = slots.own_bytes(index)
                if content is not None and compat.share_of(variable).is_apart:
                    yield slots.keeper, (optimizer_id, index, slots.updates), content


def assign_training_state(world: World, variables: Sequence, root_rank: int) -> None:
    """Set variables to the values of the root, as ``assign_from_root`` does, without the slots of divided updates that
    the root neither owns nor has another value for than the initial one, which their owners have, too; every rank makes
    the call.
    """
    slots = [index for index, variable in enumerate(variables) if compat.is_share(variable)]
    sent = []
    averages = []  # they have the values of their weights
    root = world.group.ranks[root_rank]
    if world.rank == root_rank:
        for index in slots:
            slot = variables[index]
            share = compat.share_of(slot)
            if share.weight is not None and digest_of(slot) == digest_of(share.weight):
                averages.append(index)
            elif compat.has_memory(slot) and share.owner != root:
                # A loaded file has given them memory; else they have none where they aren't owned.
                sent.append(index)
    if slots:
        sent, averages = world.object_from_root((sent, averages), root_rank)
    left_out = set(slots).difference(sent)
    assigned = [variable for index, variable in enumerate(variables) if index not in left_out]
    assign_from_root(world, assigned, root_rank)
    # TensorFlow lets an average have the memory of its weight until an update changes one of the two. By then, only the
    # owner has the average. Other ones would come from the root, or be of the weights that this rank has had before.
    for index in averages:
        slot = variables[index]
        slot.assign(compat.share_of(slot).weight)
