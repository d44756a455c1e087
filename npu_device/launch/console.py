"""Write the output of the ranks to stdout and stderr of the launcher: whole lines, each prefixed with its rank.

A progress bar refreshes its line with ``\\r``. Every five seconds, its newest refresh is written as a line of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from npu_device._src.cluster.time_limits import READER_SECONDS, REFRESH_SECONDS, TICK_SECONDS

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class Piece(NamedTuple):
    """One line (``end`` is a newline, or empty at the end of the stream) or one refresh of it (``end`` is ``\\r``)."""

    text: bytes
    end: bytes

    @property
    def is_refresh(self) -> bool:
        """Return True if the next piece replaces this one."""
        return self.end == b"\r"


class Console:
    """The launcher's stdout and stderr, shared by all streams of all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._ending_since: float | None = None

    def lines(self, fd: int, data: bytes) -> None:
        """Write whole lines."""
        with self._lock:
            self._write(fd, data)

    def say(self, text: str) -> None:
        """Print a message of the launcher itself, on stderr."""
        message = "".join(f"npurun: {line}".rstrip() + "\n" for line in text.splitlines())
        self.lines(2, message.encode(errors="backslashreplace"))

    def end(self) -> None:
        """From now on drop output that nobody reads, after some seconds: the launcher was sent a signal."""
        self._ending_since = time.monotonic()

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            # A pipe that poll calls writable takes this many bytes without blocking.
            most = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(fd).st_mode) else len(view)
            while view and fd not in self._broken:
                # Another process that shares this terminal or pipe may have made it non-blocking.
                with contextlib.suppress(BlockingIOError):
                    self._wait_for_reader(fd)
                    view = view[os.write(fd, view[:most]) :]
        except OSError:  # closed (npurun ... | head) or full: the training continues
            self._broken.add(fd)

    def _wait_for_reader(self, fd: int) -> None:
        """Wait until a write doesn't block."""
        began = time.monotonic()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while not poll.poll(TICK_SECONDS * 1000):
            if self._ending_since and time.monotonic() > max(began, self._ending_since) + READER_SECONDS:
                raise TimeoutError


class Voice:
    """One stream of one rank on the console, or of another host's npurun (rank None). Used by one thread."""

    def __init__(self, console: Console, fd: int, rank: int | None) -> None:
        self._console = console
        self._fd = fd
        self._prefix = b"" if rank is None else _prefix(rank, os.isatty(fd))
        self._refresh = b""  # the newest one that hasn't been written
        self._is_confirmed = True  # no refresh has been written whose line is still open
        self._written = time.monotonic()  # when one was

    def write(self, pieces: Iterable[Piece]) -> None:
        """Write pieces in order."""
        ready = bytearray()
        for piece in pieces:
            if piece.is_refresh:
                self._refresh = piece.text or self._refresh
                continue
            text, self._refresh = piece.text or self._refresh, b""
            if text or self._is_confirmed:
                ready += self._prefix + text + b"\n"
            self._is_confirmed = True
        if ready:
            self._console.lines(self._fd, bytes(ready))
        self.tick()

    def tick(self) -> None:
        """Write a refresh if the last one is long ago."""
        if self._refresh and time.monotonic() - self._written > REFRESH_SECONDS:
            self._written = time.monotonic()
            self.finish()

    def finish(self) -> None:
        """Write what no newline has confirmed."""
        if self._refresh:
            text, self._refresh = self._refresh, b""
            self._console.lines(self._fd, self._prefix + text + b"\n")
            self._is_confirmed = False


def _prefix(rank: int, coloured: bool) -> bytes:
    colour = _COLOURS[rank % len(_COLOURS)]
    return (f"\x1b[{colour}m[{rank}]\x1b[0m " if coloured else f"[{rank}] ").encode()
