"""The copies of a rank in the memory of npurun: what is copied, the thread that copies it, and its way to the disk.

The tensors of a copy are the buffers of the variables: TensorFlow gives a variable another buffer when it changes while
its old one is in use. So the training only waits until all tensors are listed. A thread computes checksums and copies.

Of what all ranks share, only the first rank of a host has a copy. The others compare checksums with it, and copy what
differs. Slots of a divided optimizer are copied by their owner.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.time_limits import (
    COPY_END_SECONDS,
    COPY_POLL_SECONDS,
    COPY_WAIT_SECONDS,
)
from npu_device._src.machine.free_memory import free_memory
from npu_device._src.training.checkpoint import folder
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.memory_slots import (
    SLOTS,
    Slot,
    close_slots,
    directories,
    newer_copies,
    open_slots,
)
from npu_device._src.training.checkpoint.selection import gather, on_all_ranks
from npu_device._src.world.sent_objects import from_json, to_json
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_FAILED = (
    "a copy in memory has failed:\n%s\nTraining goes on; checkpoints on the disk continue.\n"
    "What to do: give the job more memory, or leave out memory_every."
)
_TOO_LARGE = (
    "two copies of {size}, and buffers while one is made, take {needed} more, and {free} are free on this host or in "
    "its container. What to do: give the job more memory, or leave out memory_every"
)
_NO_LAUNCHER = (
    "memory_every has no effect: %s. Checkpoints are written to the disk only.\n"
    "What to do: start the job with npurun on one host, or leave out memory_every."
)

# Kinds of records. Only the first rank writes the shared ones of which all ranks have the same value.
_SHARED = "shared"
_DIFFERING = "differing"
_FILE = "file"


class SharedTensor(NamedTuple):
    """A tensor of what all ranks share."""

    key: str  # name in the files of TensorFlow
    part: str  # part of a divided variable, as TensorFlow names it; else ""
    tensor: tf.Tensor
    path: str | None  # path of a variable, by which each rank's own values are read
    is_alone: bool  # no other rank has it


class Copier:
    """Copies the part of one rank, in turns into its two slots, in a thread."""

    def __init__(self, slots: Sequence[Slot], rank: int) -> None:
        self.slots = slots
        self._problem: str | None = None  # problem of the last copy
        self._is_told = False
        self._own = slots[SLOTS * rank : SLOTS * (rank + 1)]
        self._first = slots[:SLOTS]
        self._is_first = rank == 0
        self._next = 0
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Let the last copy become complete; npurun still holds it."""
        if self._thread is not None:
            self._thread.join(COPY_END_SECONDS)
        # A thread that is stuck may still write.
        if not self.is_busy:
            close_slots(self.slots)

    def take_problem(self) -> str | None:
        """Return why the last copy has failed, once; None if it hasn't."""
        problem = self._problem
        self._problem = None
        return problem

    def report(self, problems: Sequence[str | None]) -> None:
        """Warn once of the problems of the ranks' last copies."""
        lines = [f"  rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        if lines and self._is_first and not self._is_told:
            self._is_told = True
            _log.warning(_FAILED, "\n".join(lines))

    def require_memory(self, world: World | None, size: int, interval: int) -> None:
        """Raise CheckpointError on all ranks if two copies don't fit, and one buffer more while a copy is made."""

        def check() -> None:
            mapped = sum(slot.size for slot in self.slots)
            needed = (SLOTS + 1) * size - mapped
            free = free_memory()
            if self._is_first and free is not None and needed > free:
                raise CheckpointError(
                    _TOO_LARGE.format(needed=_mb(needed), size=_mb(size), free=_mb(free))
                )

        on_all_ranks(world, check, "there is too little memory for memory_every:")
        if self._is_first:
            text = f"npu_device: copies in memory every {interval} steps: {SLOTS} x {_mb(size)} on this host"
            print(text, file=sys.stderr, flush=True)

    def copy(
        self, header: dict[str, Any], tensors: Sequence[SharedTensor], files: dict[str, bytes]
    ) -> None:
        """Begin a copy; the one before has to be over."""
        self._thread = threading.Thread(
            target=self._copy, args=(header, tensors, files), name="npu_device-copy", daemon=True
        )
        self._thread.start()

    def _copy(
        self, header: dict[str, Any], tensors: Sequence[SharedTensor], files: dict[str, bytes]
    ) -> None:
        slot = self._own[self._next % SLOTS]
        try:
            # If this copy fails, the other slot still has the one before.
            slot.clear()
            of_first = {} if self._is_first else self._checksums_of_first(header)
            records = []
            contents = []
            for shared in tensors:
                content = _bytes_of(shared.tensor)
                record = self._record(shared, content, of_first)
                if record is not None:
                    records.append(record)
                    contents.append(content)
            for name, text in files.items():
                record = {"kind": _FILE, "name": name}
                record.update(crc=zlib.crc32(text), bytes=len(text))
                records.append(record)
                contents.append(memoryview(text))
            slot.write({**header, "records": records}, contents)
            self._next += 1
        except Exception as error:
            # The thread of the training reports it before the next copy.
            self._problem = f"{type(error).__name__}: {error}"

    def _record(
        self, shared: SharedTensor, content: memoryview, of_first: dict[str, int]
    ) -> dict[str, Any] | None:
        """Return what a header tells of a tensor; None if the first rank of the host has the same one."""
        record: dict[str, Any] = {"kind": _SHARED, "name": shared.key, "part": shared.part}
        record.update(dtype=shared.tensor.dtype.name, shape=shared.tensor.shape.as_list())
        # Equal checksums of one variable are taken for equal values, as in a checkpoint on the disk.
        record.update(crc=zlib.crc32(content), bytes=len(content))
        if self._is_first or shared.is_alone:
            return record
        # What isn't a variable is taken from the first rank only, as on the disk.
        if shared.path is None or of_first.get(shared.key + shared.part) == record["crc"]:
            return None
        return {**record, "kind": _DIFFERING, "name": shared.path}

    def _checksums_of_first(self, header: dict[str, Any]) -> dict[str, int]:
        # The first rank writes its copy at this moment, so that this is a short wait.
        deadline = time.monotonic() + COPY_WAIT_SECONDS
        while time.monotonic() < deadline:
            for slot in self._first:
                if slot.look() and slot.key == (header["attempt"], header["step"]):
                    return {
                        record["name"] + record["part"]: record["crc"]
                        for record in slot.header["records"]
                        if record["kind"] == _SHARED
                    }
            time.sleep(COPY_POLL_SECONDS)
        raise TimeoutError("the first rank of the host has no copy")


def copier_of(world: World | None) -> Copier | None:
    """Return what copies the part of this rank; None, with one warning, if npurun holds no memory for all ranks."""
    rank = 0 if world is None else world.rank
    size = 1 if world is None else world.size
    slots: list[Slot] = []
    problem = None
    address = environment.NPU_DEVICE_MEMORY_COPIES.get()
    if address is None:
        problem = "npurun on a single host has not started this process"
    else:
        try:
            slots = open_slots(address)
        except OSError as error:
            problem = f"the memory of npurun is out of reach ({error})"
    if problem is None and len(slots) != SLOTS * size:
        problem = f"npurun has started {len(slots) // SLOTS} ranks here, and the job has {size}"
    problems = [text for text in gather(world, problem) if text is not None]
    if not problems:
        return Copier(slots, rank)
    if rank == 0:
        _log.warning(_NO_LAUNCHER, problems[0])
    return None


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def tensors_of(checkpoint: Any, paths: dict[int, str]) -> list[SharedTensor]:
    """Return what this rank has of a ``tf.train.Checkpoint``, given the paths of variables by their ids."""
    tensors = []
    for saved in compat.tensors_of_checkpoint(checkpoint):
        path = paths.get(id(saved.owner))
        # Until the first step of a divided optimizer, all ranks have its slots.
        is_alone = compat.is_share(saved.owner) and getattr(saved.owner, compat.SHARE).is_apart
        tensors.append(SharedTensor(saved.key, saved.part, saved.tensor, path, is_alone))
    return tensors


def _bytes_of(tensor: tf.Tensor) -> memoryview:
    # Numpy has no array of strings without a copy; there is one of them, the graph of objects.
    if tensor.dtype == tf.string:
        return memoryview(tf.io.serialize_tensor(tensor).numpy())
    array = np.ascontiguousarray(compat.to_array(tensor))
    flat = array.reshape(-1)
    return flat.view(np.uint8).data


def _tensor_of(record: dict[str, Any], content: memoryview) -> tf.Tensor:
    if record["dtype"] == "string":
        return tf.io.parse_tensor(bytes(content), tf.string)
    dtype = tf.as_dtype(record["dtype"])
    array = np.frombuffer(content, dtype.as_numpy_dtype)
    return tf.constant(array.reshape(record["shape"]), dtype)


def bytes_of_rank(variables: Sequence[Any], is_first: bool) -> int:
    """Return how many bytes a rank copies of the shared variables, before any of them differ."""
    size = 0
    for variable in variables:
        is_apart = compat.is_share(variable) and getattr(variable, compat.SHARE).is_apart
        # The owner alone has memory for a slot of a divided optimizer.
        is_copied = is_first
        if is_apart:
            is_copied = compat.has_memory(variable)
        if is_copied:
            size += int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
    return size


def to_disk(slots: Sequence[Slot], directory: Path, token: str) -> int | None:
    """Write the newest copy as a checkpoint, if it is newer than those of the directory; return its step."""
    for by_rank in newer_copies(slots, directory):
        # A rank may have been killed while it replaced this copy, or its memory may be damaged.
        contents = [slot.read() for slot in by_rank]
        if any(content is None for content in contents):
            continue
        header = by_rank[0].header
        step = header["step"]
        partial = directory / folder.partial_name(step, token)
        partial.mkdir()
        try:
            _write_files(partial, by_rank, contents)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        manifest = dict(header["manifest"])
        manifest["files"] = folder.sync_files(partial, folder.SHARED)
        for rank in range(len(by_rank)):
            manifest["files"] |= folder.sync_files(partial, folder.own_prefix(rank))
        folder.finish(directory, partial.name, step, manifest)
        folder.name_latest(directory, step)
        folder.keep_only(directory, step, header["keep"])
        return int(step)
    return None


def _write_files(partial: Path, by_rank: Sequence[Slot], contents: Sequence[Any]) -> None:
    shared: list[tuple[dict[str, Any], tf.Tensor]] = []
    for rank, slot in enumerate(by_rank):
        differing = []
        files = {}
        for record, content in zip(slot.header["records"], contents[rank]):
            if record["kind"] == _FILE:
                files[record["name"]] = bytes(content)
            elif record["kind"] == _SHARED:
                shared.append((record, _tensor_of(record, content)))
            else:
                differing.append((record, _tensor_of(record, content)))
        prefix = folder.own_prefix(rank)
        if differing:
            _save(partial / f"{prefix}.differing", differing)
        # The list of variables that differ was found after the record of the rank had been made.
        record = from_json(files[f"{prefix}.json"])
        record["differing"] = [record["name"] for record, _ in differing]
        files[f"{prefix}.json"] = to_json(record).encode()
        for name, text in files.items():
            (partial / name).write_bytes(text)
    _save(partial / folder.SHARED, shared)


def _save(prefix: Path, saved: Sequence[tuple[dict[str, Any], tf.Tensor]]) -> None:
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=[record["name"] for record, _ in saved],
        shape_and_slices=[record["part"] for record, _ in saved],
        tensors=[tensor for _, tensor in saved],
    )


def main(address: str) -> None:
    """Write the newest copy for each directory to the disk, in a process that npurun starts before it ends."""
    slots = open_slots(address)
    for directory in directories(slots):
        step = to_disk(slots, Path(directory), secrets.token_hex(4))
        if step is not None:
            text = f"npurun: the copy of step {step} in memory is written to {directory}"
            print(text, file=sys.stderr)
    close_slots(slots)


if __name__ == "__main__":
    main(*sys.argv[1:])
