"""Copies of a checkpoint in memory that npurun holds: two slots for each rank of a host, written in turns, and as many
for those of the host whose copies are sent here.

A slot is an anonymous file (``memfd_create``): npurun makes it, and ranks open it through ``/proc``. It is in no
directory, so nothing is left when npurun is killed; the size of /dev/shm doesn't matter; and it outlives the ranks.
Knows neither TensorFlow nor the names in a copy::

    mark, length and checksum of the header, whether it is sent | header (JSON) | the bytes of its records

The mark is removed before anything else changes, and is written last: half a copy is never read.

The header lists all that a rank has. Of equal records of one step, a host holds the bytes once, in any of its slots.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from npu_device._src.machine.free_memory import free_memory
from npu_device._src.training.checkpoint import folder
from npu_device._src.wording import amount

_MARK = b"npucopy1"
_START = struct.Struct("<8sQI?")
SLOTS = 2  # slots of a rank: one to write, one with the copy before

Key = tuple[int, int]
"""The attempt and the step of a copy: after a restart, the same step may have other bits."""
Record = dict[str, Any]
"""What a header tells of a tensor or file: ``name``, ``slice``, ``bytes``, ``crc``, and whether it is ``held`` here."""


class Span(NamedTuple):
    """Where the bytes of a record are."""

    record: Record
    slot: Slot
    position: int


class Memory:
    """The slots of all ranks of this host, and of a neighbour's if there are several, in the process that holds them.

    Attributes:
        slots: two for each rank.
        received: the same for each rank of the host that sends its copies here.
    """

    def __init__(self, ranks: int, has_neighbour: bool = False, name: str = "") -> None:
        self._name = name or f"npu-copies-{secrets.token_hex(8)}"
        slot_count = SLOTS * ranks
        self.slots = [self._new() for _ in range(slot_count)]
        self.received = [self._new() for _ in range(slot_count * has_neighbour)]

    def _new(self) -> Slot:
        return Slot(os.memfd_create(self._name))

    @property
    def address(self) -> str:
        """The text by which ranks find the memory."""
        fields = [self._name, str(os.getpid())]
        for slots in (self.slots, self.received):
            fields.append(",".join(str(slot.descriptor) for slot in slots))
        return ":".join(fields)

    def newer_than_disk(self) -> dict[str, tuple[int, int]]:
        """Return the newest step of the copies, and its bytes here, by directories whose newest checkpoint is older."""
        newest = {}
        for path, by_key in copies(self.slots).items():
            sizes = Counter[int]()
            for (_, step), by_rank in by_key.items():
                sizes[step] += sum(slot.size for slot in by_rank.values())
            last_step = max(sizes)
            directory = Path(path)
            # It was made before the first copy: whoever removed it wants none of its checkpoints.
            if directory.is_dir() and last_step > (folder.readable_latest(directory) or 0):
                newest[path] = last_step, sizes[last_step]
        return newest

    def step(self) -> int | None:
        """Return the newest step that all ranks of this host have copied; None if there is none."""
        steps = []
        for by_key in copies(self.slots).values():
            for (_, step), by_rank in by_key.items():
                if len(by_rank) * SLOTS == len(self.slots):
                    steps.append(step)
        return max(steps, default=None)


def folder_in_memory(address: str) -> Path:
    """Return where the ranks of a host put files that they read only once, given the address of the memory or its name.

    It may be smaller than the memory, as in containers, and is removed with npurun.
    """
    return Path("/dev/shm", address.partition(":")[0])


def open_slots(address: str) -> tuple[list[Slot], list[Slot]]:
    """Open the slots of a host, given their address: its own, and the received ones.

    Raises:
        OSError: they aren't in reach.
    """
    name, process, *lists = address.split(":")
    opened = []
    for text in lists:
        descriptors = filter(None, text.split(","))
        opened.append([_opened(name, process, descriptor) for descriptor in descriptors])
    slots, received = opened
    return slots, received


def _opened(name: str, process: str, descriptor: str) -> Slot:
    path = f"/proc/{process}/fd/{descriptor}"
    # In another PID namespace, another process may have this id.
    if name not in os.readlink(path):
        raise FileNotFoundError(f"{path} isn't memory of npurun")
    return Slot(os.open(path, os.O_RDWR | os.O_CLOEXEC))


class Slot:
    """Memory for one copy of the state of one rank.

    Attributes:
        header: the header that was loaded last, or begun.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.header: dict[str, Any] = {}
        self._data_start = 0

    @property
    def key(self) -> Key:
        return self.header["attempt"], self.header["step"]

    @property
    def size(self) -> int:
        """Return how many bytes are mapped."""
        return os.fstat(self.descriptor).st_size

    @property
    def is_unsent(self) -> bool:
        """Return whether there is a complete copy that the host's npurun has yet to send."""
        start = os.pread(self.descriptor, _START.size, 0)
        return start.startswith(_MARK) and not start[-1]

    def note_sent(self) -> None:
        os.pwrite(self.descriptor, b"\1", _START.size - 1)

    def free(self) -> None:
        """Drop the copy, and give its memory back."""
        os.ftruncate(self.descriptor, 0)

    def clear(self) -> None:
        """Drop the copy, whose memory stays."""
        # A new slot stays empty.
        if self.size:
            os.pwrite(self.descriptor, bytes(len(_MARK)), 0)

    def write(self, header: dict[str, Any], contents: Sequence[memoryview]) -> None:
        """Replace the copy by one with these contents: those of the records that are held, in their order."""
        position = self.begin(header)
        for content in contents:
            self.put(content, position)
            position += len(content)
        self.end()

    def begin(self, header: dict[str, Any]) -> int:
        """Drop the copy and begin another one, which is none until ``end``; return the position of its first bytes.

        Raises:
            MemoryError: there is no memory for it.
        """
        self.clear()
        size = sum(record["bytes"] for record in header["records"] if record["held"])
        growth = size - self.size
        free = free_memory()
        # Without this check, the kernel would kill a process of a container whose memory is full.
        if free is not None and growth > free:
            raise MemoryError(f"it takes {amount(growth)} more, and {amount(free)} are free")
        self.header = header
        head = json.dumps(header).encode()
        start = _START.pack(_MARK, len(head), zlib.crc32(head), False)
        # The mark is left out: it makes the copy complete.
        unmarked = start[len(_MARK) :] + head
        self.put(memoryview(unmarked), len(_MARK))
        self._data_start = _START.size + len(head)
        return self._data_start

    def put(self, content: memoryview, position: int) -> None:
        start = 0
        while start < len(content):
            # One call may write less than it is given.
            start += os.pwrite(self.descriptor, content[start:], position + start)

    def end(self) -> None:
        os.pwrite(self.descriptor, _MARK, 0)

    def load_header(self) -> bool:
        """Check and read the header; return False if there is no complete copy."""
        start = os.pread(self.descriptor, _START.size, 0)
        if len(start) < _START.size or not start.startswith(_MARK):
            return False
        _, length, checksum, _ = _START.unpack(start)
        head = os.pread(self.descriptor, length, _START.size)
        if len(head) != length or zlib.crc32(head) != checksum:
            return False
        self._data_start = _START.size + length
        self.header = json.loads(head)
        return True

    def spans(self) -> Iterator[Span]:
        """Yield where the bytes of each record are that the copy with the loaded header holds itself."""
        position = self._data_start
        for record in self.header["records"]:
            if record["held"]:
                yield Span(record, self, position)
                position += record["bytes"]


def full_name(record: Record) -> str:
    return str(record["name"] + record["slice"])


def identity(record: Record) -> tuple:
    """Return what two records have in common whose bytes are held once.

    Equal checksums of one variable are taken for equal values, as in a checkpoint on the disk.
    """
    return record["name"], record["slice"], record["bytes"], record["crc"]


def read(span: Span) -> memoryview | None:
    """Return the bytes of a record; None if they have changed since its header was read."""
    content = memoryview(bytearray(span.record["bytes"]))
    start = 0
    # Nothing is read at the end of the record, or of a slot that has become shorter.
    while count := os.preadv(span.slot.descriptor, [content[start:]], span.position + start):
        start += count
    if zlib.crc32(content) != span.record["crc"]:
        return None
    return content


def close_slots(slots: Sequence[Slot]) -> None:
    for slot in slots:
        os.close(slot.descriptor)


def copies(slots: Sequence[Slot]) -> dict[str, dict[Key, dict[int, Slot]]]:
    """Return the copies that these slots hold, by the directories of their checkpoints, their keys and their ranks."""
    by_directory: dict[str, dict[Key, dict[int, Slot]]] = {}
    for slot in slots:
        if slot.load_header():
            by_key = by_directory.setdefault(slot.header["directory"], {})
            by_rank = by_key.setdefault(slot.key, {})
            by_rank.setdefault(slot.header["rank"], slot)
    return by_directory
