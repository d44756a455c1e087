"""Write the ranks' output to the launcher's own stdout and stderr: whole lines, each prefixed with its rank.

Carriage returns: on a terminal, a refresh (the text before a ``\\r``) stays the last line of the screen until something
else is written, so that progress bars move. In a file or pipe, refreshes would be a flood of lines. There they are kept
in one line, each with its prefix and its ``\\r``. That line ends at the next newline, or after five seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

_REFRESH_SECONDS = 5.0
_READER_SECONDS = 5.0  # a reader that is stopped delays the end of an npurun that was sent a signal by this much
_TICK_SECONDS = 0.5
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
_ERASE = b"\x1b[K"
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"  # a refresh that wraps can't be overwritten


class Piece(NamedTuple):
    """One line (``end`` is a newline, or empty at the end of the stream) or one refresh of it (``end`` is ``\\r``)."""

    text: bytes
    end: bytes

    @property
    def is_refresh(self) -> bool:
        """Return True if the next piece overwrites this one on a terminal."""
        return self.end == b"\r"


class Console:
    """The launcher's stdout and stderr, shared by all streams of all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refreshed = False
        self._broken: set[int] = set()
        self._terminals = {fd for fd in (1, 2) if _is_terminal(fd)}
        self._ending_since: float | None = None

    def is_terminal(self, fd: int) -> bool:
        """Return True if ``fd`` (1 or 2) is a terminal."""
        return fd in self._terminals

    def lines(self, fd: int, data: bytes) -> None:
        """Write whole lines."""
        with self._lock:
            if self._refreshed and fd in self._terminals:
                data = _ERASE + data
                self._refreshed = False
            self._write(fd, data)

    def refresh(self, fd: int, text: bytes) -> None:
        """Show a line on a terminal that the next one overwrites."""
        with self._lock:
            self._refreshed = True
            self._write(fd, _ERASE + _WRAP_OFF + text + _WRAP_ON + b"\r")

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
        """Wait until a write doesn't block.

        Raises:
            TimeoutError: nobody reads, and the launcher is to end.
        """
        began = time.monotonic()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while not poll.poll(_TICK_SECONDS * 1000):
            if self._ending_since and time.monotonic() > max(began, self._ending_since) + _READER_SECONDS:
                raise TimeoutError


class Voice:
    """One stream of one rank on the console, or of another host's npurun (rank None). Used by one thread."""

    def __init__(self, console: Console, fd: int, rank: int | None) -> None:
        self._console = console
        self._fd = fd
        self._terminal = console.is_terminal(fd)
        self._prefix = b"" if rank is None else _prefix(rank, self._terminal)
        self._shown = b""  # terminal: the refresh that no newline has confirmed yet
        self._kept = bytearray()  # file or pipe: the line of refreshes that has not been written yet
        self._kept_since = 0.0

    def write(self, pieces: Iterable[Piece]) -> None:
        """Write pieces in order."""
        ready = bytearray()
        for piece in pieces:
            if piece.is_refresh:
                if self._terminal:
                    self._flush(ready)
                self._refresh(piece.text)
            else:
                ready += self._line(piece)
        self._flush(ready)

    def tick(self) -> None:
        """End a line of refreshes that has waited long enough."""
        if self._kept and time.monotonic() - self._kept_since > _REFRESH_SECONDS:
            self.finish()

    def finish(self) -> None:
        """Write what a refresh left unconfirmed."""
        if self._shown or self._kept:
            self.write([Piece(b"", b"\n")])

    def _flush(self, ready: bytearray) -> None:
        if ready:
            self._console.lines(self._fd, bytes(ready))
            ready.clear()

    def _refresh(self, text: bytes) -> None:
        if not text:  # the \r that begins a refresh
            return
        if self._terminal:
            self._shown = text
            self._console.refresh(self._fd, self._prefix + text)
        else:
            if not self._kept:
                self._kept_since = time.monotonic()
            self._kept += self._prefix + text + b"\r"

    def _line(self, piece: Piece) -> bytes:
        kept, self._kept = bytes(self._kept), bytearray()
        text, self._shown = piece.text or self._shown, b""
        if kept and not text:
            return kept[:-1] + b"\n"
        return kept + self._prefix + text + (piece.end or b"\n")


def _prefix(rank: int, coloured: bool) -> bytes:
    colour = _COLOURS[rank % len(_COLOURS)]
    return (f"\x1b[{colour}m[{rank}]\x1b[0m " if coloured else f"[{rank}] ").encode()


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd) and sys.platform != "win32"
    except OSError:
        return False
