"""Copies in memory between hosts: this host sends its copies to the npurun of one host, and gets the copies of another.

For each copy, the other side gets the header, answers which records it lacks, and gets their bytes. What a host sends
is kept by its neighbour when it is lost.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Callable

from npu_device._src.cluster import frames, handshake, ports
from npu_device._src.cluster.handshake import TimedConnection
from npu_device._src.cluster.time_limits import (
    CONNECT_SECONDS,
    COPY_END_SECONDS,
    COPY_LOOK_SECONDS,
    COPY_SEND_SECONDS,
    NODE_CONNECT_SECONDS,
)
from npu_device._src.environment import NPU_DEVICE_PORT_RANGE
from npu_device._src.threads import start_thread
from npu_device._src.training.checkpoint.memory_slots import SLOTS, Key, Memory, Slot, identity

_OF_COPIES = b" copies"  # part of what both prove, so that npuruns take each other for nothing else
_CHUNK = 1 << 22
Address = tuple[str, int]
"""Host and port."""


class Neighbour:
    """The exchange of copies: a context manager with two threads.

    Attributes:
        port: where this host takes copies.
    """

    def __init__(
        self, memory: Memory, secret: bytes, leader: str, say: Callable[[str], None]
    ) -> None:
        # A slot has the header that it was last asked for: each thread has objects of its own.
        self._slots_of_sender = [Slot(slot.descriptor) for slot in memory.slots]
        self._slots_of_receiver = [Slot(slot.descriptor) for slot in memory.slots]
        self._received = memory.received
        self._secret = secret + _OF_COPIES
        self._say = say
        # With node 0 on the loopback, all nodes are on this host.
        self._listener = ports.listen_on_free(NPU_DEVICE_PORT_RANGE.get(), (leader,))
        self.port: int = self._listener.getsockname()[1]
        self._address: Address | None = None
        self._connection: socket.socket | None = None  # by which the newest copy was sent
        self._is_told = False
        self._has_ended = threading.Event()
        self._taking = threading.Lock()

    def __enter__(self) -> Neighbour:
        serving = self._listener, self._secret, self._receive_copy
        self._threads = [
            start_thread("npurun-serve", handshake.serve, *serving),
            start_thread("npurun-send", self._send_all),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        with self._listener:
            frames.shut_down(self._listener)
        # A thread that waits for the other side is woken.
        if self._connection is not None:
            frames.shut_down(self._connection)
        for thread in self._threads:
            thread.join(CONNECT_SECONDS)

    def send_to(self, address: Address | None) -> None:
        """Send copies to another host from now on; None for none."""
        self._address = address
        self._is_told = False

    # Sending

    def _send_all(self) -> None:
        while not self._has_ended.wait(COPY_LOOK_SECONDS):
            for index, slot in enumerate(self._slots_of_sender):
                if slot.is_unsent and slot.load_header():
                    self._try_to_send(index, slot)

    def _try_to_send(self, index: int, slot: Slot) -> None:
        key = slot.key
        address = self._address
        try:
            if address is not None:
                self._send(address, index, slot)
        except Exception as error:
            # Whatever it is, training goes on.
            if not self._is_told and address is not None:
                self._is_told = True
                self._say(
                    f"the copies in memory of this host can't be sent to {ports.join_address(*address)}: {error}.\n"
                    "Until they can, the job resumes from an older copy or the disk when this host is lost.\n"
                    "What to do: let all hosts of the job reach each other at the ports of NPU_DEVICE_PORT_RANGE."
                )
        # Noted even if that failed: the ranks wait for it before they make the next copy.
        if slot.load_header() and slot.key == key:
            slot.note_sent()

    def _send(self, address: Address, index: int, slot: Slot) -> None:
        key = slot.key
        line = handshake.reach(*address, NODE_CONNECT_SECONDS, self._secret)
        with (
            line.connection as connection,
            open(slot.descriptor, "rb", buffering=0, closefd=False) as file,
        ):
            self._connection = connection
            line.send({"slot": index, "header": slot.header})
            lacking = set(_answer(line)["lacking"])
            connection.settimeout(COPY_SEND_SECONDS)
            for position, span in enumerate(slot.spans()):
                size = span.record["bytes"]
                # A size of 0 would stand for the whole file.
                if position in lacking and size:
                    connection.sendfile(file, span.position, size)
            # A rank of another attempt may have replaced it meanwhile.
            line.send({"is_whole": slot.load_header() and slot.key == key})
            _answer(line)

    # The receiving side, in the threads of the ports

    def _receive_copy(self, line: TimedConnection, _: Any) -> None:
        """Take a copy of another host; an error ends its connection."""
        # An earlier neighbour may be cut off without knowing it.
        with line.connection as connection, self._taking:
            message = _answer(line)
            header = message["header"]
            slot = self._received[message["slot"]]
            # The other side writes to this slot only when its other one is complete everywhere.
            slot.clear()
            held = self._held((header["attempt"], header["step"]))
            lacking = []
            sent = [record for record in header["records"] if record["held"]]
            for index, record in enumerate(sent):
                # Held by the sender until here, by this host from here on; ``spans`` has the same order.
                record["held"] = identity(record) not in held
                if record["held"]:
                    lacking.append(index)
            slot.begin(header)
            line.send({"lacking": lacking})
            connection.settimeout(COPY_SEND_SECONDS)
            buffer = memoryview(bytearray(_CHUNK))
            for span in slot.spans():
                position = span.position
                end = position + span.record["bytes"]
                while position < end:
                    count = connection.recv_into(buffer[: end - position])
                    if not count:
                        raise ConnectionError("the other npurun has ended")
                    slot.put(buffer[:count], position)
                    position += count
            # Otherwise the bytes may belong to two copies.
            if _answer(line)["is_whole"]:
                slot.end()
            line.send({"is_taken": True})

    def _held(self, key: Key) -> set[Any]:
        """Return what this host has of a copy itself, once it is made: all hosts make it at the same time."""
        deadline = time.monotonic() + COPY_END_SECONDS
        while True:
            copied = [
                slot for slot in self._slots_of_receiver if slot.load_header() and slot.key == key
            ]
            if len(copied) >= len(self._slots_of_receiver) // SLOTS or time.monotonic() > deadline:
                return {identity(span.record) for slot in copied for span in slot.spans()}
            time.sleep(COPY_LOOK_SECONDS)


def _answer(line: TimedConnection) -> dict[str, Any]:
    return line.receive(
        COPY_SEND_SECONDS, silent="no answer", closed="the other npurun has ended or has no memory"
    )
