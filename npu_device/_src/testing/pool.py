"""Ranks that are started once and called many times: real processes, real TensorFlow, real sockets.

Importing TensorFlow costs seconds a process, so that a pool lives until it is closed, or a rank fails alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import tempfile
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from npu_device._src.cluster.time_limits import (
    POOL_GRACE_SECONDS,
    POOL_LOOK_SECONDS,
    POOL_RELEASE_SECONDS,
    POOL_START_SECONDS,
    STACKS_SECONDS,
)
from npu_device._src.membership.rank_environment import clean_environment
from npu_device._src.testing.answers import Answer, RankError
from npu_device._src.testing.forked import end_all, start_ranks
from npu_device._src.testing.short_path import short_path

_WORKER = str(Path(__file__).parent / "worker.py")
_TAIL_LINES = 40
_NOT_TOLD = ("/_pytest/", "/pluggy/", f'"{Path(__file__).parent}/')  # files of frames
_RANK_BYTES = 400 << 20  # that a rank needs to itself, at the least


class Pool:
    """``size`` ranks under one Keras ("2" or "3"; by default what the environment says); a single process without any
    job when the size is 1.
    """

    def __init__(self, size: int, keras: str | None = None, **environment: str) -> None:
        self.size = size
        self.keras = keras
        self._directory = tempfile.TemporaryDirectory(prefix="npu_pool_")
        directory = Path(self._directory.name)
        address = str(directory / "socket")
        common = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "NPU_DEVICE_STALL_WARNING": "100",  # a rank may train alone first, on a machine with much else to do
        }
        if keras is not None:
            common["TF_USE_LEGACY_KERAS"] = "1" if keras == "2" else "0"
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        try:
            _require_memory(size)
            with (
                short_path(address) as name,
                Listener(name, family="AF_UNIX", backlog=size) as listener,
            ):
                arguments = [_WORKER, address, str(directory / "stacks")]
                self._processes = self._start(
                    arguments, {**clean_environment(), **common, **environment}
                )
                self._accept(listener)
        except BaseException:
            self.close()
            raise

    def _start(self, arguments: list[str], environment: dict[str, str]) -> list[Any]:
        return [*start_ranks(Path(self._directory.name), self.size, arguments, environment)]

    def _accept(self, listener: Listener) -> None:
        found: dict[int, tuple[Connection, int]] = {}
        listener._listener._socket.settimeout(POOL_LOOK_SECONDS)  # type: ignore[attr-defined]
        deadline = time.monotonic() + POOL_START_SECONDS
        while len(found) < self.size:
            if time.monotonic() > deadline or not self.alive:
                raise RankError("the ranks did not start\n" + self.tails(), {})
            try:
                connection = listener.accept()
                rank, pid = connection.recv()
                found[rank] = connection, pid
            except (
                OSError,
                EOFError,
            ):  # nobody yet, or a worker that ended while it opened its device
                continue
        for rank in range(self.size):
            self._connections.append(found[rank][0])
            self._pids.append(found[rank][1])

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    @property
    def processes(self) -> list[Any]:
        return list(self._processes)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Call ``function(*arguments)`` on every rank; return the results by rank, or raise RankError."""
        answers = self.ask(function, arguments, timeout)
        wrong = {rank: answer.value for rank, answer in answers.items() if not answer.succeeded}
        if wrong:
            parts = [f"rank {rank} of {self.size}:\n{text}" for rank, text in wrong.items()]
            raise RankError("\n\n".join(parts) + "\n\n" + self.tails(), wrong)
        return [answers[rank].value for rank in range(self.size)]

    def ask(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], limit: float
    ) -> dict[int, Answer]:
        """Call a function on every rank; the answers in the order in which they came.

        A rank that has failed alone leaves the job, so that those which wait for it fail, too. If one doesn't go on
        after that, the pool ends.
        """
        call = packed(function, arguments)
        answers: dict[int, Answer] = {}
        try:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it has ended, as reading shows
                    connection.send_bytes(call)
            self._receive(answers, limit, POOL_GRACE_SECONDS)
            if len(answers) < self.size:
                self._release(answers, limit)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # a timer's
                error.stacks = self.stacks()  # type: ignore[attr-defined]
            self.kill()
            raise
        finally:
            if len(answers) < self.size or not all(answer.goes_on for answer in answers.values()):
                self.close()
        return answers

    def _receive(self, answers: dict[int, Answer], seconds: float, grace: float) -> None:
        """Add answers until all are there or the time is over: some seconds, and fewer after an error."""
        until = time.monotonic() + seconds
        while len(answers) < self.size and (left := until - time.monotonic()) > 0:
            ready = wait(
                [one for rank, one in enumerate(self._connections) if rank not in answers], left
            )
            for rank in [
                rank for rank, connection in enumerate(self._connections) if connection in ready
            ]:
                answers[rank] = self._answer_of(rank)
                if not answers[rank].succeeded:
                    until = min(until, time.monotonic() + grace)

    def _answer_of(self, rank: int) -> Answer:
        try:
            answer: Answer = pickle.loads(self._connections[rank].recv_bytes())
            return answer
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._processes[rank].wait(POOL_LOOK_SECONDS)
                how = (
                    f"killed by {signal.Signals(-code).name}"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                return Answer(
                    False, f"its process was {how}" if code < 0 else f"its process {how}", False
                )
            return Answer(False, "its process has closed the connection", False)
        except Exception as error:
            return Answer(False, f"its result can't be read in the process of the test: {error!r}")

    def _release(self, answers: dict[int, Answer], limit: float) -> None:
        """Add the answers of ranks that wait for others: these leave, so that the waiting collective fails."""
        failed = not all(answer.succeeded for answer in answers.values())
        before = {} if failed else self.stacks()
        done = sorted(answers)
        for rank in done:
            self._connections[rank].send_bytes(b"")  # leave
        self._receive(answers, POOL_RELEASE_SECONDS if done else 0.0, float("inf"))
        silent = len(answers) < self.size
        stacks = before or (self.stacks() if silent else {})
        if silent:
            self.kill()
        for rank in set(range(self.size)).difference(done):
            late = f"no answer within {limit:g} s" + (
                f"; rank(s) {done} have returned" if done else ""
            )
            text = "" if failed else f"{late}. It was here:\n{stacks[rank]}"
            if rank in answers:
                text = (
                    f"{text}\nand then, when the others had left:\n{answers[rank].value}"
                    if text
                    else answers[rank].value
                )
            answers[rank] = Answer(False, text or f"no answer. It is here:\n{stacks[rank]}", False)

    def stacks(self) -> dict[int, str]:
        """Return where the threads of each rank that run code of the test or of TensorFlow are; innermost first."""
        files = [Path(f"{self._directory.name}/stacks{rank}") for rank in range(self.size)]
        before = [file.stat().st_size for file in files]
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)
        return {
            rank: _told(file.read_text()[length:])
            for rank, (file, length) in enumerate(zip(files, before))
        }

    def descriptors(self) -> list[int]:
        return [connection.fileno() for connection in self._connections if not connection.closed]

    def tails(self) -> str:
        parts = []
        for rank, process in enumerate(self._processes):
            lines = process.output.splitlines()[-_TAIL_LINES:]
            parts.append(f"--- output of rank {rank} ---\n" + "\n".join(lines))
        return "\n".join(parts)

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.close()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the ranks; those that don't end by themselves are killed."""
        self.hang_up()
        end_all(self._processes, POOL_RELEASE_SECONDS)
        self._directory.cleanup()


def _told(stacks: str) -> str:
    """Return what stacks tell: no thread of the package, no frame of pytest."""
    kept = []
    for stack in stacks.split("\n\n"):
        title, *frames = stack.splitlines() or [""]
        frames = [frame for frame in frames if not any(place in frame for place in _NOT_TOLD)]
        if title.startswith("Current") or any("/tensorflow/" in frame for frame in frames):
            kept += frames
    return "\n".join(kept) or "  not in Python code: stopped, or busy in a library"


class _NotImportable(Exception):
    """A call has a function or class that the ranks can't import."""


class _Packing(pickle.Pickler):
    """Packs a call, and refuses functions and classes that the ranks can't import."""

    def reducer_override(self, value: Any) -> Any:
        """Raise _NotImportable for them; all else is packed as usual."""
        if isinstance(value, (type, types.FunctionType)):
            if value.__module__ == "__main__":
                raise _NotImportable(
                    f"{value.__qualname__} is defined in the script or notebook that runs, which the ranks don't "
                    "import.\nWhat to do: put it into a module of its own, next to it, and import it from there."
                )
            if "<" in value.__qualname__:  # <lambda>, <locals>
                raise _NotImportable(
                    f"{value.__qualname__} is a lambda or is defined within a function, so that the ranks can't import "
                    "it.\nWhat to do: define it with def or class at the top of a module, and pass what it needs as "
                    "arguments: run(function, argument, ranks=2)."
                )
        return NotImplemented


def packed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return a call as it is sent; raise TypeError if it can't be."""
    stream = io.BytesIO()
    try:
        _Packing(stream).dump((function, arguments))
    except _NotImportable as error:
        raise TypeError(str(error)) from None
    except Exception as error:
        raise TypeError(
            f"the function or one of its arguments can't be sent to the ranks: {error}\nWhat to do: pass numbers, "
            "strings, numpy arrays, functions of modules, or lists and dictionaries of them; make the rest on the "
            "ranks."
        ) from error
    return stream.getvalue()


def _require_memory(size: int) -> None:
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(found["MemAvailable"].split()[0]) << 10
    if size * _RANK_BYTES > available:
        raise MemoryError(
            f"{size} ranks need about {size * _RANK_BYTES >> 20} MiB of memory; {available >> 20} MiB are free."
            "\nWhat to do: test with fewer ranks, 2 or 3 show most; or end other processes."
        )
