"""Forward the output of the ranks, in whole lines: to the console, each with its rank, to log files, and to a memory of
the last lines.

A progress bar refreshes its line with ``\\r``. Every five seconds, its newest refresh is written as a line of its own.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import select
import stat
import termios
import threading
import time
from collections import deque
from typing import IO, BinaryIO, Callable

from npu_device._src.cluster.time_limits import READER_SECONDS, REFRESH_SECONDS, TICK_SECONDS
from npu_device._src.threads import start_thread

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
_BLOCK_BYTES = 1 << 16
_TAIL_LINES = 200
_TAIL_LINE_BYTES = 1 << 14  # the rest of a longer line isn't kept
_LINE_BYTES = 1 << 20  # a longer line is cut into several
_END = re.compile(rb"(\r\n|\n|\r)")


class Console:
    """The stdout and stderr of the launcher, shared by all streams of all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._broken = set[int]()
        self._ending_since: float | None = None

    def write(self, fd: int, output: bytes) -> None:
        view = memoryview(output)
        with self._lock:
            try:
                most_bytes = len(view)
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    # A pipe that poll calls writable takes this many bytes without blocking.
                    most_bytes = select.PIPE_BUF
                while view and fd not in self._broken:
                    # Another process that shares this terminal or pipe may have made it non-blocking.
                    with contextlib.suppress(BlockingIOError):
                        self._wait_for_reader(fd)
                        view = view[os.write(fd, view[:most_bytes]) :]
            except OSError:
                # The output may be closed (npurun ... | head) or full: the training continues.
                self._broken.add(fd)

    def say(self, text: str) -> None:
        """Print a message of the launcher itself, on stderr."""
        message = "".join(f"npurun: {line}".rstrip() + "\n" for line in text.splitlines())
        self.write(2, message.encode(errors="backslashreplace"))

    def end(self) -> None:
        """From now on drop output that nobody reads, after some seconds: the launcher was sent a signal."""
        self._ending_since = time.monotonic()

    def _wait_for_reader(self, fd: int) -> None:
        """Wait until a write doesn't block; raise TimeoutError if nobody reads, and the launcher is to end."""
        began = time.monotonic()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while not poll.poll(TICK_SECONDS * 1000):
            if (
                self._ending_since
                and time.monotonic() > max(began, self._ending_since) + READER_SECONDS
            ):
                raise TimeoutError


def _takes_nothing(line: bytes) -> bool:
    return False


class Pump:
    """A thread that forwards one stream until its end. While it doesn't read, the writing rank is blocked.

    ``tail`` are the last lines, of each the first 16 KiB. A stream without a rank gets no prefix. Lines that ``takes``
    returns True for go nowhere else.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        console: Console | None,
        fd: int,
        rank: int | None = None,
        log: BinaryIO | None = None,
        takes: Callable[[bytes], bool] = _takes_nothing,
    ) -> None:
        self.tail = deque[bytes](maxlen=_TAIL_LINES)
        self._pipe = pipe
        self._console = console
        self._fd = fd
        self._log = log
        self._takes = takes
        # The prefix has a colour only where a person looks.
        self._prefix = _prefix(rank, os.isatty(fd))
        self._beginning = b""  # begin of a line that hasn't ended
        self._bar = b""  # the newest refresh, if it hasn't been written
        self._bar_is_written = False  # a bar is written, and its line hasn't ended
        self._bar_written_at = time.monotonic()
        self._ending = threading.Event()
        self._thread = start_thread("npurun-output", self._run)

    def finish(self) -> None:
        """Return when all output of the rank has arrived. Don't wait for a process that escaped with the pipe."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        # The end closes the pipe: a process that escaped with it gets an error instead of blocking.
        with self._pipe:
            while not self._ending.is_set():
                output = b""
                if poll.poll(TICK_SECONDS * 1000):
                    output = os.read(self._pipe.fileno(), _BLOCK_BYTES)
                    if not output:
                        break
                self._write(self._lines(output))
            else:
                # Only what is there is read, since a process that escaped with the pipe may go on writing.
                count = array.array("i", [0])
                fcntl.ioctl(self._pipe, termios.FIONREAD, count)
                self._write(self._lines(os.read(self._pipe.fileno(), count[0])))
        # A last line without an end counts.
        if self._beginning or self._bar:
            self._write(self._lines(b"\n"))

    def _lines(self, output: bytes) -> list[bytes]:
        """Return the lines that output completes. They are bytes, so that nothing is undecodable."""
        lines = []
        if b"\n" in output or b"\r" in output:
            *texts_and_ends, self._beginning = _END.split(self._beginning + output)
            for text, end in zip(texts_and_ends[0::2], texts_and_ends[1::2]):
                if end == b"\r":
                    self._bar = text or self._bar
                    continue
                # The end of a bar that has just been written makes no empty line.
                if text or self._bar or not self._bar_is_written:
                    lines.append(text or self._bar)
                self._bar = b""
                self._bar_is_written = False
        else:
            self._beginning += output
        # Memory must not grow with a program that never ends its line.
        if len(self._beginning) >= _LINE_BYTES:
            lines.append(self._beginning)
            self._beginning = b""
        if self._bar and time.monotonic() - self._bar_written_at > REFRESH_SECONDS:
            lines.append(self._bar)
            self._bar = b""
            self._bar_is_written = True
            self._bar_written_at = time.monotonic()
        return lines

    def _write(self, lines: list[bytes]) -> None:
        lines = [line for line in lines if not self._takes(line)]
        if not lines:
            return
        self.tail.extend(line[:_TAIL_LINE_BYTES] for line in lines)
        if self._log is not None:
            try:
                self._log.write(b"".join(line + b"\n" for line in lines))
            except OSError:
                # The disk may be full: the training continues.
                self._log = None
        if self._console is not None:
            self._console.write(self._fd, b"".join(self._prefix + line + b"\n" for line in lines))


def _prefix(rank: int | None, is_terminal: bool) -> bytes:
    if rank is None:
        return b""
    if is_terminal:
        return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)
    return b"[%d] " % rank
