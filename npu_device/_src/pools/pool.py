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
from typing import Any, cast

from npu_device._src.cluster.time_limits import (
    POOL_GRACE_SECONDS,
    POOL_LOOK_SECONDS,
    POOL_RELEASE_SECONDS,
    POOL_START_SECONDS,
    POOL_WAIT_SECONDS,
    STACKS_SECONDS,
)
from npu_device._src.machine.free_memory import free_memory
from npu_device._src.membership.rank_environment import clean_environment
from npu_device._src.pools.answers import Answer, RankError
from npu_device._src.pools.forked import end_all, start_ranks
from npu_device._src.pools.short_path import short_path

_WORKER = str(Path(__file__).parent / "worker.py")
_TAIL_LINES = 40
# In the paths of files whose frames a traceback leaves out.
_LEFT_OUT = ("/_pytest/", "/pluggy/", f'"{Path(__file__).parent}/')
_RANK_BYTES = 400 << 20  # the least memory that a rank needs to itself


class Pool:
    """``size`` ranks under one Keras ("2" or "3"; by default what the environment says); a single process without any
    job when the size is 1.

    Attributes:
        processes: those of the ranks.
        has_horovod_variables: the ranks get the variables of Horovod's launcher, too.
        ends_as_scripts: the ranks end as scripts do, with their threads and exit functions; otherwise, at once.
        has_returned: the last call has returned on all ranks.
    """

    has_horovod_variables = False
    ends_as_scripts = False

    def __init__(self, size: int, keras: str | None = None, **environment: str) -> None:
        self.size = size
        self.keras = keras
        self._directory = tempfile.TemporaryDirectory(prefix="npu_pool_")
        directory = Path(self._directory.name)
        address = str(directory / "socket")
        common = {  # unless the user has set them
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # On a busy machine, a rank may train alone for a while before the others come.
            "NPU_DEVICE_STALL_WARNING": "100",
        }
        common.update(self._inherited())
        if keras is not None:
            common["TF_USE_LEGACY_KERAS"] = str(int(keras == "2"))
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        self.processes: list = []
        self.has_returned = False
        try:
            _require_memory(size)
            with (
                short_path(address) as name,
                # The backlog has room for all ranks: none may be refused.
                Listener(name, family="AF_UNIX", backlog=size) as listener,
            ):
                arguments = [_WORKER, address, str(directory / "stacks"), f"{self.ends_as_scripts}"]
                self.processes = self._start(arguments, {**common, **environment})
                self._accept(listener)
        except BaseException:
            self.close()
            raise

    def _inherited(self) -> dict[str, str]:
        """Return the variables that the ranks have of this process."""
        return clean_environment()

    def _start(self, arguments: list[str], environment: dict[str, str]) -> list:
        directory = self._directory.name
        horovod = self.has_horovod_variables
        # What the ranks leave there is removed with the pool.
        temporary = directory
        if self.ends_as_scripts:
            # A temporary file of a script may be its result.
            temporary = tempfile.gettempdir()
        return start_ranks(Path(directory), self.size, arguments, environment, horovod, temporary)

    def _accept(self, listener: Listener) -> None:
        ranks: dict[int, tuple[Connection, int]] = {}
        # ``Listener`` has no limit of its own, and a rank that ends early would be waited for
        # forever.
        listener._listener._socket.settimeout(POOL_LOOK_SECONDS)  # type: ignore[attr-defined]
        deadline = time.monotonic() + POOL_START_SECONDS
        while len(ranks) < self.size:
            if time.monotonic() > deadline or not self.alive:
                raise RankError("the ranks did not start\n" + self.tails(), {})
            try:
                connection = listener.accept()
                rank, pid = connection.recv()
                ranks[rank] = (connection, pid)
            except (OSError, EOFError):
                continue  # no rank yet, or one that ended while it opened its device
        # Sorted by rank, since ranks connect in any order.
        for _, (connection, pid) in sorted(ranks.items()):
            self._connections.append(connection)
            self._pids.append(pid)

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def run(self, function: Callable, *arguments: Any, timeout: float = 300) -> list:
        """Call ``function(*arguments)`` on every rank; return the results by rank, or raise RankError."""
        answers = self.ask(function, arguments, timeout)
        errors = {rank: answer.value for rank, answer in answers.items() if not answer.succeeded}
        if errors:
            texts = [f"rank {rank} of {self.size}:\n{text}" for rank, text in errors.items()]
            raise RankError("\n\n".join([*texts, self.tails()]), errors)
        return [answers[rank].value for rank in range(self.size)]

    def ask(self, function: Callable, arguments: tuple, limit: float) -> dict[int, Answer]:
        """Call a function on every rank; the answers in the order in which they came.

        A rank that has failed alone leaves the job, so that those which wait for it fail, too. If one doesn't go on
        after that, the pool ends.
        """
        call = packed(function, arguments)
        answers: dict[int, Answer] = {}
        try:
            for connection in self._connections:
                # A rank that has ended is found when its answer is read.
                with contextlib.suppress(OSError):
                    connection.send_bytes(call)
            self._receive(answers, limit, POOL_GRACE_SECONDS)
            if len(answers) < self.size:
                self._release(answers, limit)
            self.has_returned = all(answer.succeeded for answer in answers.values())
        except BaseException as error:
            # But for Ctrl-C, this is the error of a timer of the test, whose report shows where each rank was.
            if not isinstance(error, KeyboardInterrupt):
                error.stacks = self.stacks()  # type: ignore[attr-defined]
            self.kill()
            raise
        finally:
            # A rank that can't be called again makes the pool useless.
            if len(answers) < self.size or not all(answer.goes_on for answer in answers.values()):
                self.close()
        return answers

    def _receive(self, answers: dict[int, Answer], seconds: float, grace: float) -> None:
        """Add answers until all are there or the time is over: some seconds, and fewer after an error."""
        until = time.monotonic() + seconds
        while len(answers) < self.size and time.monotonic() < until:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in answers
            }
            # A call may have no limit, but the system knows no endless number of seconds.
            longest = min(POOL_WAIT_SECONDS, max(0.0, until - time.monotonic()))
            for connection in wait(list(waiting), longest):
                rank = waiting[cast(Connection, connection)]
                answers[rank] = self._answer_of(rank)
                if not answers[rank].succeeded:
                    # The other ranks often fail of the same error a moment later, and then have a
                    # report of their own.
                    until = min(until, time.monotonic() + grace)

    def _answer_of(self, rank: int) -> Answer:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.processes[rank].wait(POOL_LOOK_SECONDS)
                text = f"its process ended with exit code {code}"
                if code < 0:
                    text = f"its process was killed by {signal.Signals(-code).name}"
                return Answer(False, text, False)
            return Answer(False, "its process has closed the connection", False)
        except Exception as error:
            return Answer(False, f"its result can't be read in the process of the test: {error!r}")

    def _release(self, answers: dict[int, Answer], limit: float) -> None:
        """Add the answers of ranks that wait for others: these leave, so that the waiting collective fails."""
        has_failed = not all(answer.succeeded for answer in answers.values())
        returned = sorted(answers)
        silent = set(range(self.size)).difference(returned)
        stacks = {}
        if not has_failed:
            stacks = self.stacks()
        for rank in returned:
            # An empty message lets the rank leave its call, unless its process has ended.
            with contextlib.suppress(OSError):
                self._connections[rank].send_bytes(b"")
        if returned:
            self._receive(answers, POOL_RELEASE_SECONDS, float("inf"))
        # A rank that doesn't wait for the others hangs by itself.
        if len(answers) < self.size:
            stacks = stacks or self.stacks()
            self.kill()
        lateness = f"no answer within {limit:g} s"
        if returned:
            lateness += f"; rank(s) {returned} have returned"
        for rank in silent:
            if has_failed and rank in answers:
                end = answers[rank].value  # an error text, or pytest's reports
            elif has_failed:
                end = f"no answer. It is here:\n{stacks[rank]}"
            else:
                end = f"{lateness}. It was here:\n{stacks[rank]}"
                if rank in answers:
                    end += f"\nand then, when the others had left:\n{answers[rank].value}"
            answers[rank] = Answer(False, end, False)

    def stacks(self) -> dict[int, str]:
        """Return where the threads of each rank that run code of the test or of TensorFlow are; innermost first."""
        files = [Path(f"{self._directory.name}/stacks{rank}") for rank in range(self.size)]
        # The files are written by a handler in C, which only appends.
        lengths = [file.stat().st_size for file in files]
        for pid in self._pids:
            # A process that hangs in C can't answer, but the handler of faulthandler runs at once.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)
        return {
            rank: _shortened(file.read_text()[length:])
            for rank, (file, length) in enumerate(zip(files, lengths))
        }

    def tails(self) -> str:
        tails = []
        for rank, process in enumerate(self.processes):
            lines = process.output.splitlines()[-_TAIL_LINES:]
            tails.append("\n".join([f"--- output of rank {rank} ---", *lines]))
        return "\n".join(tails)

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.close()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End the ranks; those that don't end by themselves are killed."""
        self.hang_up()
        end_all(self.processes, POOL_RELEASE_SECONDS)
        # A process that a rank has left may be writing there.
        with contextlib.suppress(OSError):
            self._directory.cleanup()


def _shortened(stacks: str) -> str:
    """Return the frames of stacks without threads of the package, and without frames of pytest."""
    output = []
    for stack in stacks.split("\n\n"):
        title, *frames = stack.splitlines() or [""]
        frames = [frame for frame in frames if not any(path in frame for path in _LEFT_OUT)]
        if title.startswith("Current") or any("/tensorflow/" in frame for frame in frames):
            output += frames
    return "\n".join(output) or "  not in Python code: stopped, or busy in a library"


class _NotImportable(Exception):
    """A call has a function or class that the ranks can't import."""


class _Packing(pickle.Pickler):
    """Packs a call, and refuses functions and classes that the ranks can't import."""

    def reducer_override(self, obj: Any) -> Any:
        """Raise _NotImportable for them; all else is packed as usual."""
        # Only classes and functions are sent by name, which the ranks have to import.
        if isinstance(obj, (type, types.FunctionType)):
            if obj.__module__ == "__main__":
                raise _NotImportable(
                    f"{obj.__qualname__} is defined in the script or notebook that runs, which the ranks don't "
                    "import.\nWhat to do: put it into a module of its own, next to it, and import it from there."
                )
            if "<" in obj.__qualname__:  # <lambda>, <locals>
                raise _NotImportable(
                    f"{obj.__qualname__} is a lambda or is defined within a function, so that the ranks can't import "
                    "it.\nWhat to do: define it with def or class at the top of a module, and pass what it needs as "
                    "arguments: run(function, argument, ranks=2)."
                )
        return NotImplemented


def packed(function: Callable, arguments: tuple) -> bytes:
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
    available = free_memory()
    if available is not None and size * _RANK_BYTES > available:
        raise MemoryError(
            f"{size} ranks need about {size * _RANK_BYTES >> 20} MiB of memory; {available >> 20} MiB are free."
            "\nWhat to do: test with fewer ranks, 2 or 3 show most; or end other processes."
        )
