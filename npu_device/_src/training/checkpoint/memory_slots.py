"""Copies of a checkpoint in memory that npurun holds: two slots for each rank of a host, written in turns.

A slot is an anonymous file (``memfd_create``): npurun makes it, and ranks open it through ``/proc``. It is in no
directory, so nothing is left when npurun is killed; the size of /dev/shm doesn't matter; and it outlives the ranks.
Knows neither TensorFlow nor the names in a copy::

    mark, length and checksum of the header | header (JSON) | the bytes of its records

The mark is removed before anything else changes, and is written last: half a copy is never read.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_device._src.training.checkpoint import folder

_MARK = b"npucopy1"
_START = struct.Struct("<8sQI")
_CHUNK = 1 << 22
SLOTS = 2  # slots of a rank: one to write, one with the copy before

Key = tuple[int, int]
"""The attempt and the step of a copy: after a restart, the same step may have other bits."""


class Memory:
    """The slots of all ranks of this host, in the process that holds them."""

    def __init__(self, ranks: int) -> None:
        self._name = f"npu-copies-{secrets.token_hex(8)}"
        self.slots = [Slot(os.memfd_create(self._name)) for _ in range(SLOTS * ranks)]

    @property
    def address(self) -> str:
        """The text by which ranks find it."""
        descriptors = ",".join(str(slot.descriptor) for slot in self.slots)
        return f"{self._name} {os.getpid()} {descriptors}"

    def is_newer_than_disk(self) -> bool:
        """Return whether a directory has an older newest checkpoint than the newest complete copy for it."""
        return any(newer_copies(self.slots, Path(path)) for path in directories(self.slots))

    def step(self) -> int | None:
        """Return the newest step that all ranks have copied; None if there is none."""
        keys = []
        for directory in directories(self.slots):
            keys += [by_rank[0].key for by_rank in copies(self.slots, directory)]
        if not keys:
            return None
        _, step = max(keys)
        return step

    def close(self) -> None:
        """Free the memory when no rank uses it any more."""
        close_slots(self.slots)


def open_slots(address: str) -> list[Slot]:
    """Open the slots of all ranks of a host, given their address; raise OSError if they aren't in reach."""
    name, process, descriptors = address.split()
    slots = []
    for descriptor in descriptors.split(","):
        path = f"/proc/{process}/fd/{descriptor}"
        # In another PID namespace, another process may have the number.
        if name not in os.readlink(path):
            raise FileNotFoundError(f"{path} isn't memory of npurun")
        slots.append(Slot(os.open(path, os.O_RDWR | os.O_CLOEXEC)))
    return slots


class Slot:
    """Memory for one copy of the part of one rank.

    Attributes:
        header: that of the complete copy which ``look`` has found. Each of its records has its ``bytes`` and ``crc``.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.header: dict[str, Any] = {}
        self._data = 0  # position where the data begins

    @property
    def key(self) -> Key:
        return self.header["attempt"], self.header["step"]

    @property
    def size(self) -> int:
        """Return how many bytes are mapped."""
        return os.fstat(self.descriptor).st_size

    def clear(self) -> None:
        """Drop the copy, whose memory stays."""
        if self.size:
            os.pwrite(self.descriptor, bytes(len(_MARK)), 0)

    def write(self, header: dict[str, Any], contents: Sequence[memoryview]) -> None:
        """Replace the copy by one with these contents, in the order of its records."""
        self.clear()
        head = json.dumps(header).encode()
        position = _START.size
        for content in (memoryview(head), *contents):
            start = 0
            while start < len(content):
                # In chunks, until all is written: one call may write less than it is given.
                piece = content[start : start + _CHUNK]
                start += os.pwrite(self.descriptor, piece, position + start)
            position += len(content)
        start_bytes = _START.pack(_MARK, len(head), zlib.crc32(head))
        os.pwrite(self.descriptor, start_bytes[len(_MARK) :], len(_MARK))
        os.pwrite(self.descriptor, _MARK, 0)

    def look(self) -> bool:
        """Return whether there is a complete copy, and read its header."""
        self.header = {}
        start = os.pread(self.descriptor, _START.size, 0)
        if len(start) < _START.size or not start.startswith(_MARK):
            return False
        _, length, checksum = _START.unpack(start)
        head = os.pread(self.descriptor, length, _START.size)
        if len(head) != length or zlib.crc32(head) != checksum:
            return False
        self._data = _START.size + length
        self.header = json.loads(head)
        return True

    def read(self) -> list[memoryview] | None:
        """Return the contents of the copy that ``look`` has found; None if any of them has changed since."""
        contents = []
        position = self._data
        for record in self.header["records"]:
            content = memoryview(bytearray(record["bytes"]))
            start = 0
            while start < len(content):
                piece = content[start : start + _CHUNK]
                count = os.preadv(self.descriptor, [piece], position + start)
                if not count:
                    return None
                start += count
            if zlib.crc32(content) != record["crc"]:
                return None
            position += len(content)
            contents.append(content)
        return contents


def close_slots(slots: Sequence[Slot]) -> None:
    for slot in slots:
        os.close(slot.descriptor)


def directories(slots: Sequence[Slot]) -> list[str]:
    """Return the directories for whose checkpoints there are copies."""
    return sorted({slot.header["directory"] for slot in slots if slot.look()})


def copies(slots: Sequence[Slot], directory: str) -> list[list[Slot]]:
    """Return the copies that are complete on every rank, newest first: the slots of each, by rank."""
    by_key: dict[Key, dict[int, Slot]] = {}
    for index, slot in enumerate(slots):
        if slot.look() and slot.header["directory"] == directory:
            by_key.setdefault(slot.key, {})[index // SLOTS] = slot
    ranks = range(len(slots) // SLOTS)
    complete = [key for key, by_rank in by_key.items() if len(by_rank) == len(ranks)]
    return [[by_key[key][rank] for rank in ranks] for key in sorted(complete, reverse=True)]


def newer_copies(slots: Sequence[Slot], directory: Path) -> list[list[Slot]]:
    """Return the complete copies for a directory that are newer than its newest checkpoint, newest first."""
    on_disk = folder.latest(directory) or 0
    complete = copies(slots, str(directory))
    return [by_rank for by_rank in complete if by_rank[0].header["step"] > on_disk]
