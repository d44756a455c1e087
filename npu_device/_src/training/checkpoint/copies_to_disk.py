"""The way of copies in memory to the disk: the newest one that the hosts together have becomes a checkpoint.

Each host has the copies of its ranks, and those of another host. So the part of a lost host comes from its neighbour,
and the number of ranks may be another one than when the copies were made. The first rank of each host reads what its
host has; all directories get all files.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src.training.checkpoint import folder, selection
from npu_device._src.training.checkpoint.memory_slots import (
    Key,
    Record,
    Slot,
    Span,
    close_slots,
    copies,
    directories,
    identity,
    open_slots,
    read,
)
from npu_device._src.training.checkpoint.selection import Storage, gather, on_all_ranks
from npu_device._src.world.sent_objects import from_json, to_json
from npu_device._src.world.world import World

# Kinds of records. What is shared has the same value on all ranks, or another one on each; what is alone is a part of
# what is shared that a single rank has.
SHARED = "shared"
ALONE = "alone"
FILE = "file"
_PIECE = "piece-"  # begin of the names of files that become the shared ones together
_PROBLEM = "the newest copy in memory can't be written:"


class _Complete(NamedTuple):
    """A copy that the hosts together have, newer than the checkpoints on the disk."""

    key: Key
    writers: dict[int, int]  # by rank of the copy, the rank that writes its part

    @property
    def root(self) -> int:
        """Return the rank that has the part of rank 0, whose values are written as those of all."""
        return self.writers[0]


def to_disk(
    world: World | None, storage: Storage, slots: Sequence[Slot], directory: Path
) -> int | None:
    """Write the newest complete copy as a checkpoint, if it is newer than those of the directory; return its step.

    Every rank has to call this, the first rank of each host with its slots, and the others without any.

    Raises:
        CheckpointError: the files can't be written; on all ranks.
    """
    on_host = copies(slots, str(directory))
    for complete in _newer(world, storage, on_host, directory):
        partial = directory / folder.partial_name(complete.key[1], storage.token)
        try:
            if _write(world, storage, on_host.get(complete.key, {}), complete, partial):
                _finish(world, storage, on_host.get(complete.key, {}), complete, partial)
                return complete.key[1]
        finally:
            if storage.is_keeper:
                shutil.rmtree(partial, ignore_errors=True)
    return None


def _newer(
    world: World | None,
    storage: Storage,
    on_host: Mapping[Key, Mapping[int, Slot]],
    directory: Path,
) -> Iterator[_Complete]:
    """Yield the complete copies that are newer than the newest checkpoint, newest first; the same on all ranks."""
    listed = []
    for key, by_rank in on_host.items():
        size = next(iter(by_rank.values())).header["manifest"]["world_size"]
        listed.append((key, size, sorted(by_rank)))
    on_disk = folder.readable_latest(directory) or 0
    gathered = gather(world, (on_disk, listed))
    newest = max(step for step, _ in gathered)
    sizes: dict[Key, int] = {}
    writers: dict[Key, dict[int, int]] = {}
    for writer, (_, copied) in enumerate(gathered):
        for key, size, ranks in copied:
            sizes[key] = size
            for rank in ranks:
                writers.setdefault(key, {}).setdefault(rank, writer)
    for key in sorted(sizes, reverse=True):
        if key[1] > newest and set(writers[key]) == set(range(sizes[key])):
            yield _Complete(key, writers[key])


def _write(
    world: World | None,
    storage: Storage,
    by_rank: Mapping[int, Slot],
    complete: _Complete,
    partial: Path,
) -> bool:
    """Write the files of the parts; return False if some of the memory is damaged."""
    spans = {identity(span.record): span for slot in by_rank.values() for span in slot.spans()}
    written = sorted(rank for rank, writer in complete.writers.items() if writer == storage.rank)
    common = []
    if storage.rank == complete.root:
        common = _of_kind(by_rank[0].header["records"], SHARED)
    checksums = {_name(record): record["crc"] for record in common}
    if world is not None:
        checksums = world.object_from_root(checksums, complete.root)

    def write() -> bool:
        partial.mkdir(exist_ok=True)
        try:
            for rank in written:
                _write_part(partial, rank, by_rank[rank].header["records"], spans, checksums)
            named = [(record["name"], record) for record in common]
            _save(partial / f"{_PIECE}{folder.SHARED}", named, spans)
        except _DamagedError:
            return False
        return True

    return all(on_all_ranks(world, write, _PROBLEM))


def _finish(
    world: World | None,
    storage: Storage,
    by_rank: Mapping[int, Slot],
    complete: _Complete,
    partial: Path,
) -> None:
    """Complete the checkpoint in all directories."""
    # Ranks may share the directory: which of the files this one has written is known by their names.
    prefixes = []
    for rank, writer in complete.writers.items():
        if writer == storage.rank:
            prefixes += [folder.own_prefix(rank), f"{_PIECE}{folder.own_prefix(rank)}"]
    header = None
    if storage.rank == complete.root:
        prefixes.append(f"{_PIECE}{folder.SHARED}")
        header = by_rank[0].header
    names = [path.name for path in partial.iterdir() if path.name.startswith(tuple(prefixes))]
    gathered = gather(world, (sorted(names), header))
    if world is not None and len(set(storage.keepers)) > 1:
        for root, (sent, _) in enumerate(gathered):
            takes = storage.is_keeper and storage.keepers[root] != storage.rank
            selection.send_files(world, partial, sent, root, takes)
    header = gathered[complete.root][1]
    directory = partial.parent

    def finish() -> None:
        _merge(partial)
        manifest = dict(header["manifest"])
        manifest["files"] = folder.sync_files(partial, folder.SHARED)
        for rank in complete.writers:
            manifest["files"] |= folder.sync_files(partial, folder.own_prefix(rank))
        folder.finish(directory, partial.name, complete.key[1], manifest)

    def name_latest() -> None:
        folder.name_latest(directory, complete.key[1])
        selection.warn_of_remains(folder.keep_only(directory, complete.key[1], header["keep"]))

    # The checkpoint is whole on all hosts before any of them names it.
    for stage in (finish, name_latest):
        on_all_ranks(world, stage if storage.is_keeper else lambda: None, _PROBLEM)


class _DamagedError(Exception):
    """A rank was killed while it replaced a copy, or the memory is damaged."""


def _name(record: Record) -> str:
    return str(record["name"] + record["part"])


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _write_part(
    partial: Path,
    rank: int,
    records: Sequence[Record],
    spans: Mapping[Any, Span],
    checksums: Mapping[str, int],
) -> None:
    """Write what a rank has of its own, given the checksums of what is written as that of all."""
    prefix = folder.own_prefix(rank)
    differing = []
    for record in _of_kind(records, SHARED):
        # What isn't a variable is taken from one rank only, as on the disk.
        if record["path"] is not None and record["crc"] != checksums.get(_name(record)):
            differing.append((record["path"], record))
    _save(partial / f"{prefix}.differing", differing, spans)
    alone = [(record["name"], record) for record in _of_kind(records, ALONE)]
    _save(partial / f"{_PIECE}{prefix}", alone, spans)
    for record in _of_kind(records, FILE):
        content = bytes(_content(record, spans))
        # The list of variables that differ was found after the record of the rank had been made.
        if record["name"] == f"{prefix}.json":
            state = from_json(content.decode())
            state["differing"] = [path for path, _ in differing]
            content = to_json(state).encode()
        (partial / record["name"]).write_bytes(content)


def _content(record: Record, spans: Mapping[Any, Span]) -> memoryview:
    span = spans.get(identity(record))
    content = None
    if span is not None:
        content = read(span)
    if content is None:
        raise _DamagedError
    return content


def _save(prefix: Path, saved: Sequence[tuple[str, Record]], spans: Mapping[Any, Span]) -> None:
    if saved:
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=[name for name, _ in saved],
            shape_and_slices=[record["part"] for _, record in saved],
            tensors=[_tensor_of(record, _content(record, spans)) for _, record in saved],
        )


def _tensor_of(record: Record, content: memoryview) -> tf.Tensor:
    if record["dtype"] == "string":
        return tf.io.parse_tensor(bytes(content), tf.string)
    dtype = tf.as_dtype(record["dtype"])
    array = np.frombuffer(content, dtype.as_numpy_dtype)
    return tf.constant(array.reshape(record["shape"]), dtype)


def _merge(partial: Path) -> None:
    """Make one set of the pieces of the shared files."""
    pieces = sorted(partial.glob(f"{_PIECE}*.index"))
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[str(path.with_suffix("")) for path in pieces],
        destination_prefix=str(partial / folder.SHARED),
        delete_old_dirs=False,
    )
    for path in partial.glob(f"{_PIECE}*"):
        path.unlink()


def main(address: str) -> None:
    """Write the newest copy for each directory to the disk, in a process that npurun starts before it ends."""
    slots, received = open_slots(address)
    storage = Storage(secrets.token_hex(4), (0,), 0)
    for directory in directories(slots):
        step = to_disk(None, storage, slots, Path(directory))
        if step is not None:
            text = f"npurun: the copy of step {step} in memory is written to {directory}"
            print(text, file=sys.stderr)
    close_slots([*slots, *received])


if __name__ == "__main__":
    main(*sys.argv[1:])
