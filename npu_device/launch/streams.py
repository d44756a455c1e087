"""Forward one stream of one rank from its pipe to the console, the rank's log file and the memory of its last lines."""

from __future__ import annotations

import array
import fcntl
import os
import re
import select
import termios
import threading
from collections import deque
from collections.abc import Iterable
from typing import IO, BinaryIO

from npu_device._src.cluster.time_limits import TICK_SECONDS
from npu_device.launch.console import Piece, Voice

_BLOCK_BYTES = 1 << 16
_TAIL_LINES = 200
_TAIL_LINE_BYTES = 1 << 14  # the rest of a longer line isn't kept
_LINE_BYTES = 1 << 20  # a longer line is cut into several
_END = re.compile(rb"(\r\n|\n|\r)")


class Splitter:
    """Splits a stream into lines and refreshes. It works on bytes, so that nothing is undecodable."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Piece]:
        """Return the pieces that ``data`` completes."""
        if b"\n" not in data and b"\r" not in data:  # a long line: don't search all of it again for each block
            self._rest += data
            if len(self._rest) < _LINE_BYTES:
                return []
            text, self._rest = bytes(self._rest), bytearray()
            return [Piece(text, b"\n")]
        parts = _END.split(bytes(self._rest) + data)
        self._rest = bytearray(parts[-1])
        return [Piece(text, end) for text, end in zip(parts[0::2], parts[1::2])]

    def finish(self) -> list[Piece]:
        """Return the last line, if it has no newline."""
        return [Piece(bytes(self._rest), b"")] if self._rest else []


class LogFile:
    """One rank's log: the lines of its stdout and stderr as they come, byte for byte up to 1 MiB a line."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._file: BinaryIO | None = open(path, "wb", buffering=0)  # noqa: SIM115
        self._refreshed_by: object = None

    def write(self, writer: object, pieces: Iterable[Piece]) -> None:
        """Add pieces of one stream; a refresh of another stream (``writer`` tells them apart) keeps its own line."""
        pieces = list(pieces)
        if not pieces:
            return
        data = b"".join(text + (end or b"\n") for text, end in pieces)
        with self._lock:
            if self._file is None:
                return
            if self._refreshed_by not in (None, writer):
                data = b"\n" + data
            self._refreshed_by = writer if pieces[-1].is_refresh else None
            try:
                self._file.write(data)
            except OSError:  # the disk is full: the training continues
                self.close()

    def close(self) -> None:
        """Close the file; later output is dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Pump:
    """A thread that forwards one stream until its end. While it doesn't read, the writing rank is blocked.

    Attributes:
        tail: the last 200 lines of the stream, of each the first 16 KiB.
    """

    def __init__(self, pipe: IO[bytes], voice: Voice | None, log: LogFile | None) -> None:
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._pipe = pipe
        self._voice = voice
        self._log = log
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when all of the rank's output has arrived. Don't wait for a process that escaped with the pipe."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        splitter = Splitter()
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        with self._pipe:
            while not self._ending.is_set():
                if poll.poll(TICK_SECONDS * 1000):
                    data = os.read(self._pipe.fileno(), _BLOCK_BYTES)
                    if not data:
                        break
                    self._carry(splitter.feed(data))
                if self._voice is not None:
                    self._voice.tick()
            else:  # a process that escaped with the pipe may go on writing to it
                data = os.read(self._pipe.fileno(), _bytes_in(self._pipe))
                self._carry(splitter.feed(data))
        self._carry(splitter.finish())
        if self._voice is not None:
            self._voice.finish()

    def _carry(self, pieces: list[Piece]) -> None:
        self.tail.extend(piece.text[:_TAIL_LINE_BYTES] for piece in pieces if not piece.is_refresh)
        if self._log is not None:
            self._log.write(self, pieces)
        if self._voice is not None:
            self._voice.write(pieces)


def _bytes_in(pipe: IO[bytes]) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]
