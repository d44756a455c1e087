"""Starts ranks as forks of a process that has imported TensorFlow already (``fork_server.py``): a start takes
milliseconds instead of seconds. Everything else about them is as if Python had been started: own environment, own
``__main__``, the whole exit of the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from npu_device._src.cluster.time_limits import SWEEP_SECONDS
from npu_device._src.membership.rank_environment import horovod_environment, table_environment

_SERVER = Path(__file__).parent / "fork_server.py"
# There is a server for each combination of variables with these prefixes, but for variables that are read later.
_READ_BY_IMPORT = ("TF_", "XLA_", "KERAS_", "NPU_DEVICE_TIME_LIMITS")
_READ_LATER = ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_KERAS_3 = ("TF_USE_LEGACY_KERAS", "0")  # the value that counts without the variable

_BLOCK_BYTES = 1 << 20

_servers: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}
_start_lock = threading.Lock()
_numbers = itertools.count()


@functools.cache
def _directory() -> str:
    """Return the folder of outputs and exit codes, made when first needed: ranks import this file, too."""
    # Not a ``TemporaryDirectory``, which a forked child would remove when it ends.
    directory = tempfile.mkdtemp(prefix="npu_forked_")
    atexit.register(close)
    return directory


class ForkedProcess:
    """One script in a process of its own, with the part of ``subprocess.Popen`` that tests need.

    Args:
        temporary: the folder for its temporary files; default: one that is removed when this process ends.
    """

    def __init__(
        self, arguments: list[str], environment: dict[str, str], temporary: str | None = None
    ) -> None:
        process_id = next(_numbers)
        # Threads that begin together would each make one.
        with _start_lock:
            folder = _directory()
        self._output = Path(folder) / f"{process_id}.log"
        self._status = Path(folder) / f"{process_id}.status"
        self._output.touch()
        order = {
            "arguments": arguments,
            # Ranks that are killed leave temporary files, which are removed with this folder.
            "environment": {**environment, "TMPDIR": temporary or folder},
            "directory": os.getcwd(),
            "path": [os.path.abspath(path) for path in sys.path],
            "output": str(self._output),
            "status": str(self._status),
        }
        # One after the other, so that each thread reads the answer to its own order.
        with _start_lock:
            self._server = _server(environment)
            self.pid = self._pid(json.dumps(order))
        self.returncode: int | None = None

    def _pid(self, order: str) -> int:
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(order + "\n")
            server.stdin.flush()
            # The server answers when the fork is there; without an answer, it has ended.
            answer = server.stdout.readline()
        except BaseException:
            # After an interrupt, the next order would read this answer.
            server.kill()
            raise
        if not answer:
            raise RuntimeError(
                f"the process that forks ranks ended with code {server.wait()}; see its output above"
            )
        return int(answer)

    def read(self, position: int) -> bytes:
        """Return a block of the output from a position on."""
        with self._output.open("rb") as output:
            output.seek(position)
            return output.read(_BLOCK_BYTES)

    @property
    def output(self) -> str:
        """Return what the script has printed so far, with its errors."""
        return self._output.read_text(errors="replace")

    def remove_files(self) -> None:
        """Remove the output of a process that has ended."""
        self._output.unlink(missing_ok=True)
        self._status.unlink(missing_ok=True)

    def poll(self) -> int | None:
        if self.returncode is None:
            is_killed = self._server.poll() is not None
            if self._status.exists():
                self.returncode = int(self._status.read_text())
            elif is_killed:
                # The system has killed it with its server, which has written no end before.
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(SWEEP_SECONDS)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            # The process may end between the look at its status and the signal.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_ranks(
    directory: Path,
    size: int,
    arguments: list[str],
    environment: dict[str, str],
    horovod: bool = False,
    temporary: str | None = None,
) -> list[ForkedProcess]:
    """Start a script on the ranks of a job, with a rank table when there are several; ``horovod``: also with what
    Horovod's launcher tells them; ``temporary`` as in ``ForkedProcess``.
    """
    processes = []
    for rank in range(size):
        variables = {}
        if size > 1:
            variables.update(table_environment(directory, size, rank))
        if horovod:
            variables.update(horovod_environment(rank, size, size))
        processes.append(ForkedProcess(arguments, {**variables, **environment}, temporary))
    return processes


def end_all(processes: Sequence, seconds: float) -> list[int]:
    """Wait for processes, and kill those that run longer; return which."""
    deadline = time.monotonic() + seconds
    late = []
    for index, process in enumerate(processes):
        try:
            # Each process gets some time, also the last.
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(index)
            process.kill()
            process.wait()
    return late


def _server(environment: dict[str, str]) -> subprocess.Popen[str]:
    # Variables that TensorFlow reads when it is imported must be the same as in the server.
    key = frozenset(
        (name, text)
        for name, text in environment.items()
        if name.startswith(_READ_BY_IMPORT) and name not in _READ_LATER and (name, text) != _KERAS_3
    )
    if key not in _servers or _servers[key].poll() is not None:
        _servers[key] = subprocess.Popen(
            [sys.executable, "-u", str(_SERVER)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            # Ctrl-C is for this process alone.
            start_new_session=True,
        )
    return _servers[key]


def close() -> None:
    atexit.unregister(close)
    for server in _servers.values():
        # The server ends when its input ends, and its ranks with it.
        server.communicate()
    _servers.clear()
    shutil.rmtree(_directory(), ignore_errors=True)
    _directory.cache_clear()


def _leave_to_parent() -> None:
    """Leave servers and folder to the parent of this forked child: a server ends when nobody holds its input."""
    atexit.unregister(close)
    _directory.cache_clear()
    for server in _servers.values():
        for pipe in (server.stdin, server.stdout):
            if pipe is not None and not pipe.closed:
                # Closing the pipe takes a lock, which another thread may have held during the fork.
                with open(os.devnull, "r+b") as empty:
                    os.dup2(empty.fileno(), pipe.fileno(), inheritable=False)


os.register_at_fork(after_in_child=_leave_to_parent)
