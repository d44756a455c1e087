"""The copies of a rank in the memory of npurun: what is copied, and the thread that copies it.

Python waits for the thread before it ends, so that a copy under way becomes complete without ``close``, too.

The tensors of a copy are the buffers of the variables: TensorFlow gives a variable another buffer when it changes while
its old one is in use. So the training only waits until all tensors are listed. A thread computes checksums and copies.

Of what all ranks share, only the first rank of a host has a copy. The others compare checksums with it, and copy what
differs. Slots of a divided optimizer are copied by their owner. npurun sends each copy to another host.

The last copy of ranks that end for a node that comes or goes has all slots on rank 0: the next ranks may be others.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.rank_errors import PeerError
from npu_device._src.cluster.time_limits import (
    COPY_END_SECONDS,
    COPY_POLL_SECONDS,
    COPY_WAIT_SECONDS,
)
from npu_device._src.machine.free_memory import free_memory
from npu_device._src.training.checkpoint.copies_to_disk import OWNED, SHARED
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.memory_slots import (
    SLOTS,
    Record,
    Slot,
    close_slots,
    folder_in_memory,
    full_name,
    open_slots,
)
from npu_device._src.training.checkpoint.selection import Storage, on_all_ranks, warn
from npu_device._src.wording import amount

_log = logging.getLogger("npu_device")
_FAILED = (
    "a copy in memory has failed: %s.\nTraining goes on; checkpoints on the disk continue.\n"
    "What to do: give the job more memory, or leave out memory_every."
)
_TOO_LARGE = (
    "two copies of {held}, and buffers while one is made, take {growth} more, and {free} are free on this host or in "
    "its container. What to do: give the job more memory, or leave out memory_every"
)
_NO_LAUNCHER = (
    "memory_every has no effect: %s. Checkpoints are written to the disk only.\n"
    "What to do: start the job with npurun, on several hosts with --max-restarts; or leave out memory_every."
)


Content = tuple[Record, Any]
"""What is copied: the record of a tensor or file, without its size and checksum, and the tensor, or the bytes."""


class Copier:
    """Copies the state of one rank, in turns into its two slots, in a thread.

    Attributes:
        readable_slots: the slots of the host on its first rank, none on the others.
        storage: where the ranks of each host can put files that they read only once.
        ranks_of_node_0: the ranks on the host of rank 0.
    """

    def __init__(
        self,
        storage: Storage,
        slots: Sequence[Slot],
        received: Sequence[Slot],
        folder: Path,
    ) -> None:
        self._slots = [*slots, *received]
        # A script may drop a checkpoint without closing it.
        self._close_slots = weakref.finalize(self, close_slots, self._slots)
        ranks = range(len(storage.keepers))
        ranks_per_host = len(slots) // SLOTS
        self._hosts = len(ranks) // ranks_per_host
        self._host, local_rank = divmod(storage.rank, ranks_per_host)
        firsts = tuple(rank - rank % ranks_per_host for rank in ranks)
        self.storage = storage._replace(directory=folder, keepers=firsts)
        self._is_first = self.storage.is_keeper
        self.readable_slots: Sequence[Slot] = ()
        if self._is_first:
            self.readable_slots = self._slots
        self.ranks_of_node_0 = ranks[:ranks_per_host]
        self._has_warned = False  # of a failed copy of this rank
        self._is_whole = False  # True if the last copy is whole
        self._own_slots = slots[SLOTS * local_rank : SLOTS * (local_rank + 1)]
        self._slots_of_first_rank = slots[:SLOTS]
        whole = [slot for slot in self._own_slots if slot.load_header()]
        newest = max(whole, key=attrgetter("key"), default=None)
        # The newest copy stays until there is another whole one.
        self._next_slot = int(newest is self._own_slots[0])
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether the last copy isn't made, or isn't sent to another host, yet."""
        is_sending = self._hosts > 1 and any(slot.is_unsent for slot in self._own_slots)
        return is_sending or self._is_copying

    @property
    def _is_copying(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Let the last copy become complete; npurun still holds it."""
        if self._thread is not None:
            self._thread.join(COPY_END_SECONDS)
        # A thread that is stuck may still write.
        if not self._is_copying:
            self._close_slots()

    def wait(self) -> bool:
        """Wait until the last copy is made, and is sent to another host; return whether it is whole."""
        deadline = time.monotonic() + COPY_END_SECONDS
        # If the copy is still on its way when this rank ends, npurun sends it.
        while self.is_busy and time.monotonic() < deadline:
            time.sleep(COPY_POLL_SECONDS)
        return self._is_whole and not self._is_copying

    def free(self) -> None:
        """Give the memory of all copies back."""
        received = self.readable_slots[SLOTS * len(self.ranks_of_node_0) :]
        for slot in (*self._own_slots, *received):
            slot.free()

    def has_room(self, size: int) -> bool:
        """Return whether the host has memory for a copy of some bytes, and for the files that are made of it."""
        free = free_memory()
        return not self._is_first or free is None or 2 * size <= free

    def require_memory(self, size: int, interval: int) -> None:
        """Raise CheckpointError on all ranks if two copies don't fit, and one buffer more while a copy is made.

        Args:
            size: bytes that this rank copies.
            interval: steps between copies.
        """
        # The ranks of a host are next to each other.
        sizes = np.asarray(self.storage.gather(size))
        by_host = sizes.reshape(self._hosts, -1).sum(axis=1).tolist()
        held = amount(by_host[self._host])
        needed = (SLOTS + 1) * by_host[self._host]
        text = f"{SLOTS} x {held} on this host"
        if self._hosts > 1:
            # The hosts form a circle: each receives the copies of the host before.
            received = by_host[self._host - 1]
            needed += SLOTS * received
            held += f", two of {amount(received)} from another host"
            text = (
                f"on each host {SLOTS} x {amount(max(by_host))}, and up to as much of another host"
            )

        def check() -> None:
            growth = needed - sum(slot.size for slot in self._slots)
            free = free_memory()
            if self._is_first and free is not None and growth > free:
                text = _TOO_LARGE.format(held=held, growth=amount(growth), free=amount(free))
                raise CheckpointError(text)

        on_all_ranks(self.storage.world, check, "there is too little memory for memory_every:")
        if self.storage.rank == 0:
            text = f"npu_device: copies in memory every {interval} steps: {text}"
            print(text, file=sys.stderr, flush=True)

    def copy(self, header: dict[str, Any], contents: Sequence[Content]) -> None:
        """Begin a copy; the one before has to be over."""
        self._is_whole = False
        self._thread = threading.Thread(
            target=self._copy, args=(header, contents), name="npu_device-copy"
        )
        self._thread.start()

    def _copy(self, header: dict[str, Any], tensors: Sequence[Content]) -> None:
        slot = self._own_slots[self._next_slot % SLOTS]
        try:
            # If this copy fails, the other slot still has the one before.
            slot.clear()
            of_first = {} if self._is_first else self._checksums_of_first(header)
            records = []
            contents = []
            for record, tensor in tensors:
                content = _bytes_of(tensor)
                checksum = zlib.crc32(content)
                is_held = True
                # What isn't a variable is taken from the first rank only, as on the disk.
                if record["kind"] == SHARED and not self._is_first:
                    is_same = of_first.get(full_name(record)) == checksum
                    is_held = record["path"] is not None and not is_same
                copied = {"bytes": len(content), "crc": checksum, "held": is_held}
                records.append({**record, **copied})
                if is_held:
                    contents.append(content)
            slot.write({**header, "records": records}, contents)
            self._next_slot += 1
            self._is_whole = True
        except Exception as error:
            # The end of the job has an error of its own.
            if not self._has_warned and not isinstance(error, PeerError):
                self._has_warned = True
                _log.warning(_FAILED, f"{type(error).__name__}: {error}")

    def _checksums_of_first(self, header: dict[str, Any]) -> dict[str, int]:
        # The first rank writes its copy at this moment, so that this is a short wait.
        deadline = time.monotonic() + COPY_WAIT_SECONDS
        names = ("directory", "attempt", "step")
        wanted = [header[name] for name in names]
        while time.monotonic() < deadline:
            for slot in self._slots_of_first_rank:
                if slot.load_header() and [slot.header[name] for name in names] == wanted:
                    records = slot.header["records"]
                    shared = [record for record in records if record["kind"] == SHARED]
                    return {full_name(record): record["crc"] for record in shared}
            # A first rank that has failed makes none, and the script may have ended meanwhile.
            if self.storage.world is not None:
                self.storage.world.job.health.require_running()
            time.sleep(COPY_POLL_SECONDS)
        raise TimeoutError("the first rank of the host has no copy")


def copier_of(storage: Storage, is_demanded: bool) -> Copier | None:
    """Return what copies the state of this rank; None if npurun holds no memory for all ranks.

    If copies are demanded, a warning tells it. Else they are made in a job of several nodes, when one comes or goes.
    """
    size = len(storage.keepers)
    slots: list[Slot] = []
    received: list[Slot] = []
    problem = None
    address = environment.NPU_DEVICE_MEMORY_COPIES.get()
    # The address of a job of one node ends without slots of another one.
    if not is_demanded and (address is None or address.endswith(":")):
        return None
    if address is None:
        problem = "npurun has not started this process, or lets no host restart"
    else:
        try:
            slots, received = open_slots(address)
        except OSError as error:
            problem = f"the memory of npurun is out of reach ({error})"
    started = len(slots) // SLOTS
    # With several hosts, all have the same number of ranks.
    is_whole = started == size or (received and size % started == 0)
    if problem is None and not is_whole:
        problem = f"npurun has started {started} ranks here, and the job has {size}"
    problems = [text for text in storage.gather(problem) if text is not None]
    if not problems:
        return Copier(storage, slots, received, folder_in_memory(address or ""))
    close_slots([*slots, *received])
    if is_demanded:
        warn(_NO_LAUNCHER, problems[0])
    return None


def tensors_of(checkpoint: Any, paths: dict[int, str], rank: int, is_last: bool) -> list[Content]:
    """Return what this rank has of a ``tf.train.Checkpoint``, given the paths of variables by their ids.

    In the last copy of a rank, divided slots are shared tensors of rank 0, and of no other rank.
    """
    is_whole = is_last and rank == 0
    tensors = []
    for owner, key, slice_spec, tensor in compat.tensors_of_checkpoint(checkpoint, is_whole):
        # Until the first step of a divided optimizer, all ranks have its slots.
        is_owned = compat.is_apart(owner) and not is_whole
        if is_owned and is_last:
            continue
        record = {
            "kind": OWNED if is_owned else SHARED,
            "name": key,
            "slice": slice_spec,
            # By the path of a variable, each rank's own values are read.
            "path": paths.get(id(owner)),
            "dtype": tensor.dtype.name,
            "shape": tensor.shape.as_list(),
        }
        tensors.append((record, tensor))
    return tensors


def _bytes_of(tensor: tf.Tensor | bytes) -> memoryview:
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    # Numpy has no array of strings without a copy; there is one of them, the graph of objects.
    if tensor.dtype == tf.string:
        return memoryview(tf.io.serialize_tensor(tensor).numpy())
    return compat.bytes_of_tensor(tensor)
