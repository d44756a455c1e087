"""The way of copies in memory to files: the newest one that the hosts together have becomes a checkpoint.

It is written to the disk, or, if the ranks have ended for a node that comes or goes, to memory if it fits there.

Each host has the copies of its ranks, and those of another host. So the state of a lost host comes from its neighbour,
and the number of ranks may be another one than when the copies were made. The first rank of each host reads what its
host has; all directories get all files.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.checkpoint import folder, selection
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.memory_slots import (
    Key,
    Record,
    Slot,
    copies,
    full_name,
    identity,
    open_slots,
    read,
)
from npu_device._src.training.checkpoint.selection import Storage, gather, on_all_ranks
from npu_device._src.training.opening import device
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.world.sent_objects import from_json, to_json
from npu_device._src.world.world import World

# Kinds of records. What is shared has the same value on all ranks, or another one on each; what is alone is a part of
# what is shared that a single rank has.
SHARED = "shared"
OWNED = "alone"
FILE = "file"
_PIECE = "piece-"  # begin of the names of files that become the shared ones together
_INDEX = ".index"
_PROBLEM = "the newest copy in memory can't be written:"


def to_files(
    disk: Storage, slots: Sequence[Slot], memory: Storage | None = None
) -> tuple[int, Storage] | None:
    """Write the newest complete copy as a checkpoint, if it is newer than what the disk has; return its step, and where
    it is: in memory if it is the last copy of ranks that have ended for others.

    Every rank has to call this, the first rank of each host with its slots, and the others without any.

    Raises:
        CheckpointError: the files can't be written; on all ranks.
    """
    on_host = copies(slots).get(str(disk.directory), {})
    for copy in _newer(disk, on_host):
        of_host = on_host.get(copy.key, {})
        if copy.is_last and memory is not None:
            try:
                if _CheckpointOfCopy(memory, copy, of_host).write():
                    return copy.step, memory
            except CheckpointError as error:
                selection.warn("%s\nIt is written to the disk instead.", error)
        if _CheckpointOfCopy(disk, copy, of_host).write():
            return copy.step, disk
    return None


class _Copy(NamedTuple):
    """A complete copy that the hosts together have."""

    key: Key
    rank_count: int  # number of ranks that have made it
    is_last: bool  # the ranks have ended after it
    writer_by_rank: dict[
        int, int
    ]  # for each rank of the copy, the first rank of a host that has its state

    @property
    def step(self) -> int:
        _, step = self.key
        return step


def _newer(disk: Storage, on_host: Mapping[Key, Mapping[int, Slot]]) -> Iterator[_Copy]:
    """Yield the complete copies that are newer than the newest checkpoint, newest first; all ranks get the same."""
    listed = []
    for key, by_rank in on_host.items():
        header = next(iter(by_rank.values())).header
        rank_count = header["manifest"]["world_size"]
        is_last = header.get("is_last", False)
        listed.append((key, rank_count, is_last, sorted(by_rank)))
    on_disk = folder.readable_latest(disk.directory) or 0
    gathered = disk.gather((on_disk, listed))
    newest = max(step for step, _ in gathered)
    copies_by_key: dict[Key, _Copy] = {}
    for writer, (_, copied) in enumerate(gathered):
        for key, rank_count, is_last, ranks in copied:
            copy = copies_by_key.setdefault(key, _Copy(key, rank_count, is_last, {}))
            for rank in ranks:
                copy.writer_by_rank.setdefault(rank, writer)
    for key in sorted(copies_by_key, reverse=True):
        copy = copies_by_key[key]
        ranks_found = set(copy.writer_by_rank)
        is_complete = ranks_found == set(range(copy.rank_count))
        # A job with another number of ranks takes only what rank 0 has: all that is shared.
        is_enough = copy.is_last and 0 in ranks_found and copy.rank_count != len(gathered)
        attempt, step = key
        # Copies of this attempt for a directory without checkpoints, and all for a directory that wasn't there, are of
        # an earlier training of the script, which has removed its own.
        is_of_this_attempt = attempt == environment.NPU_DEVICE_RESTART_COUNT.get()
        is_of_earlier_training = newest == 0 and (disk.is_new or is_of_this_attempt)
        if is_of_earlier_training:
            # A later attempt would take them for copies of this training.
            for slot in on_host.get(key, {}).values():
                slot.clear()
        elif step > newest and (is_complete or is_enough):
            yield copy


class _CheckpointOfCopy:
    """The checkpoint that becomes of a complete copy; all ranks make the same calls."""

    def __init__(self, storage: Storage, copy: _Copy, by_rank: Mapping[int, Slot]) -> None:
        self._storage = storage
        self._step = copy.step
        writer_by_rank = copy.writer_by_rank
        self._partial = storage.partial(copy.step)
        self._records: dict[int, list[Record]] = {}
        self._spans = {}
        for rank, slot in by_rank.items():
            if writer_by_rank[rank] == storage.rank:
                self._records[rank] = slot.header["records"]
            for span in slot.spans():
                self._spans[identity(span.record)] = span
        # What all ranks share is written with the values of rank 0.
        self._common: list[Record] = []
        header = {}
        if 0 in self._records:
            self._common = _of_kind(self._records[0], SHARED)
            header = {name: by_rank[0].header[name] for name in ("manifest", "keep")}
        sent = header, {full_name(record): record["crc"] for record in self._common}
        if storage.world is not None:
            sent = storage.world.object_from_root(sent, writer_by_rank[0])
        self._header, self._checksums = sent

    def write(self) -> bool:
        """Write all files; return False, without a checkpoint, if some of the memory is damaged."""
        try:
            on_all_ranks(self._storage.world, self._make_folder, _PROBLEM)
            written = on_all_ranks(self._storage.world, self._write_ranks, _PROBLEM)
            if None in written:
                return False
            self._send(written)
            files = {name: sums for by_name in written for name, sums in by_name.items()}
            keep = self._header["keep"]
            manifest = functools.partial(self._manifest, files)
            selection.complete(self._storage, self._step, keep, manifest, _PROBLEM)
        finally:
            if self._storage.is_keeper:
                shutil.rmtree(self._partial, ignore_errors=True)
        return True

    def _make_folder(self) -> None:
        if self._storage.is_keeper:
            # A folder in memory is for this user only, as the memory of npurun is.
            self._storage.directory.mkdir(0o700, exist_ok=True)
            self._partial.mkdir(exist_ok=True)

    def _write_ranks(self) -> dict[str, list[int]] | None:
        """Return size and checksum of each file, those of pieces without; None if some of the memory is damaged."""
        piece = f"{_PIECE}{self._storage.rank}-"
        files: dict[str, list[int]] = {}
        try:
            for rank, records in self._records.items():
                self._write_rank(rank, records, f"{piece}{rank}")
                files |= folder.sync_files(self._partial, folder.own_prefix(rank))
            self._save(f"{piece}{folder.SHARED}", self._common)
        except _DamagedError:
            return None
        for path in self._partial.glob(f"{piece}*"):
            files[path.name] = []
        return files

    def _write_rank(self, rank: int, records: Sequence[Record], piece: str) -> None:
        """Write what a rank has of its own, and its piece of the shared files."""
        prefix = folder.own_prefix(rank)
        differing = []
        for record in _of_kind(records, SHARED):
            # What isn't a variable is taken from one rank only, as on the disk.
            common_checksum = self._checksums.get(full_name(record))
            if record["path"] is not None and record["crc"] != common_checksum:
                differing.append(record)
        self._save(f"{prefix}.differing", differing, "path")
        self._save(piece, _of_kind(records, OWNED))
        for record in _of_kind(records, FILE):
            content = bytes(self._content(record))
            # The list of variables that differ was found after the record of the rank had been made.
            if record["name"] == f"{prefix}.json":
                state = from_json(content.decode())
                state["differing"] = [shared["path"] for shared in differing]
                content = to_json(state).encode()
            (self._partial / record["name"]).write_bytes(content)

    def _save(self, prefix: str, records: Sequence[Record], key: str = "name") -> None:
        """Save tensors under their names in the shared files, or by another key of their records."""
        if not records:
            return
        tensors = [_tensor_of(record, self._content(record)) for record in records]
        tf.raw_ops.SaveV2(
            prefix=str(self._partial / prefix),
            tensor_names=[record[key] for record in records],
            shape_and_slices=[record["slice"] for record in records],
            tensors=tensors,
        )

    def _content(self, record: Record) -> memoryview:
        span = self._spans.get(identity(record))
        content = None
        if span is not None:
            content = read(span)
        if content is None:
            raise _DamagedError
        return content

    def _send(self, written: Sequence[dict[str, list[int]]]) -> None:
        """Let all directories have the files of all ranks."""
        storage = self._storage
        if storage.world is None or not storage.has_copies:
            return
        for root, files in enumerate(written):
            receives = storage.is_keeper and storage.keepers[root] != storage.rank
            selection.send_files(storage.world, self._partial, sorted(files), root, receives)

    def _manifest(self, files: dict[str, list[int]]) -> dict[str, Any]:
        """Make the shared files of their pieces; return the manifest."""
        pieces = [name for name in sorted(files) if name.startswith(_PIECE)]
        prefixes = [name.removesuffix(_INDEX) for name in pieces if name.endswith(_INDEX)]
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(self._partial / prefix) for prefix in prefixes],
            destination_prefix=str(self._partial / folder.SHARED),
            delete_old_dirs=False,
        )
        for name in pieces:
            (self._partial / name).unlink(missing_ok=True)
        manifest = dict(self._header["manifest"])
        manifest["files"] = folder.sync_files(self._partial, folder.SHARED)
        manifest["files"] |= {name: sums for name, sums in files.items() if sums}
        return manifest


class _DamagedError(Exception):
    """A rank was killed while it replaced a copy, or the memory is damaged."""


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _tensor_of(record: Record, content: memoryview) -> tf.Tensor:
    if record["dtype"] == "string":
        return tf.io.parse_tensor(bytes(content), tf.string)
    return compat.tensor_of_bytes(content, record["dtype"], record["shape"])


def write_newest(world: World | None, slots: Sequence[Slot]) -> None:
    """Write the newest copy for each directory to the disk; every rank has to call this, as ``to_files``.

    Raises:
        CheckpointError: some could not be written; on all ranks, after the others.
    """
    paths = itertools.chain.from_iterable(gather(world, list(copies(slots))))
    problems = []
    for path in sorted(set(paths)):
        # What the script has removed stays removed.
        if not any(gather(world, Path(path).is_dir())):
            continue
        try:
            disk = selection.find_storage(world, Path(path))
            written = to_files(disk, slots)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        text = f"no complete copy in memory is newer than the checkpoints in {path}"
        if written is not None:
            step, _ = written
            text = f"the copy of step {step} in memory is written to {path}"
        if disk.rank == 0:
            print(f"npu_device: {text}", file=sys.stderr)
    if problems:
        raise CheckpointError("\n".join(problems))


def main() -> None:
    """Write what this host has, as a rank of the job that npurun runs before it ends."""
    device.open()
    slots, received = open_slots(environment.NPU_DEVICE_MEMORY_COPIES.get() or "")
    write_newest(current_world(), [*slots, *received])


if __name__ == "__main__":
    main()
