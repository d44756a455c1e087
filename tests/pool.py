"""Worker processes that are started once and run many test bodies: real ranks, real TensorFlow, real sockets.

A body is a module-level function of a test file. ``Pool.run(body, *arguments)`` calls it on every rank at once and
returns what each returned. Importing TensorFlow costs seconds a process, so that a pool lives as long as the test
session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Callable

from answers import Answer
from forked import Process
from ranks import clean_environment, table_environment

_HERE = Path(__file__).parent
_WORKER = str(_HERE / "pool_worker.py")
_TAIL_LINES = 40
_REPETITIONS = 3  # of a body that has left something


class Pool:
    """``size`` worker processes under one Keras ("2" or "3"); one of them without any distributed environment when the
    size is 1.
    """

    def __init__(self, size: int, keras: str, **extra_environment: str) -> None:
        self.size = size
        self.keras = keras
        self._growing: set[str] = set()  # bodies that have left something at their first run
        self._directory = tempfile.TemporaryDirectory(prefix="npu_pool_")
        directory = Path(self._directory.name)
        address = str(directory / "socket")
        with Listener(address, family="AF_UNIX", backlog=size) as listener:
            common = {
                "TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "NPU_DEVICE_STALL_WARNING": "100",  # a rank may train alone first, on a machine with much else to do
            }
            self._processes = self._start([_WORKER, address], {**clean_environment(), **common, **extra_environment})
            self._connections = self._accept(listener)

    def _start(self, arguments: list[str], environment: dict[str, str]) -> list[Any]:
        # Bodies may import benchmarks/, as this process does; it isn't installed.
        environment = {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(_HERE.parent)])}
        directory = Path(self._directory.name)
        tables = [table_environment(directory, self.size, rank) if self.size > 1 else {} for rank in range(self.size)]
        return [Process(arguments, {**environment, **table}) for table in tables]

    def _accept(self, listener: Listener) -> list[Connection]:
        connections: dict[int, Connection] = {}
        listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
        deadline = time.monotonic() + 120
        while len(connections) < self.size:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self.close()
                raise AssertionError("the workers did not start\n" + self.tails())
            try:
                connection = listener.accept()
                connections[connection.recv()] = connection
            except (OSError, EOFError):  # nobody yet, or a worker that ended while it opened its device
                continue
        return [connections[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def run(self, body: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Call ``body(*arguments)`` on every rank; the results by rank.

        An error or a warning on any rank fails the test, with all ranks' outputs. So does a thread or a descriptor that
        a body leaves each time that it runs. A body that has left something is run again, on the same arguments: what
        all later bodies use, such as a group's background thread, is made when a rank first needs it, which is at
        another run on another rank.
        """
        answers = self._run(body, arguments, timeout)
        if any(answer.left for answer in answers) and body.__qualname__ not in self._growing:
            self._growing.add(body.__qualname__)
            left = {rank: answer.left for rank, answer in enumerate(answers) if answer.left}
            for _ in range(_REPETITIONS):
                again = self._run(body, arguments, timeout)
                left = {rank: again[rank].left for rank in left if again[rank].left}
                if not left:
                    break
            if left:
                problems = [f"rank {rank}: {what}" for rank, what in left.items()]
                raise AssertionError("\n".join([f"each run of {body.__qualname__} leaves something:", *problems]))
        return [answer.value for answer in answers]

    def _run(self, body: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Answer]:
        for connection in self._connections:
            connection.send((body.__module__, body.__qualname__, arguments))
        deadline = time.monotonic() + timeout
        answers: list[Answer] = []
        problems: list[str] = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    problems.append(f"rank {rank}: no answer within {timeout} s")
                    continue
                answer = connection.recv()
            except (EOFError, OSError):
                problems.append(f"rank {rank}: its process ended")
                continue
            answers.append(answer)
            if not answer.succeeded:
                problems.append(f"rank {rank}:\n{answer.value}")
            problems += [f"rank {rank} warned: {warning}" for warning in answer.warnings]
        if problems:
            tails = self.tails()
            if len(answers) < self.size:
                tails += "\n" + self._stacks()
                self.close()
            raise AssertionError("\n".join(problems) + "\n" + tails)
        return answers

    @property
    def processes(self) -> list[Process]:
        """The workers."""
        return list(self._processes)

    def descriptors(self) -> list[int]:
        """Return the descriptors that this process holds for the pool."""
        return [connection.fileno() for connection in self._connections if not connection.closed]

    def tails(self) -> str:
        """The end of each rank's output."""
        parts = []
        for rank, process in enumerate(self._processes):
            lines = process.output.splitlines()[-_TAIL_LINES:]
            parts.append(f"--- output of rank {rank} ---\n" + "\n".join(lines))
        return "\n".join(parts)

    def _stacks(self) -> str:
        """Where the Python threads of each rank are."""
        before = [len(process.output) for process in self._processes]
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)  # pool_worker.py
        time.sleep(1)
        outputs = [process.output[length:] for process, length in zip(self._processes, before)]
        return "\n".join(f"--- stacks of rank {rank} ---\n{output}" for rank, output in enumerate(outputs))

    def hang_up(self) -> None:
        """Let the workers end, without waiting for them."""
        for connection in getattr(self, "_connections", []):
            connection.close()

    def close(self) -> None:
        self.hang_up()
        deadline = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()
