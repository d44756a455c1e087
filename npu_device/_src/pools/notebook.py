"""``npu.run``: a function of a notebook or script on new processes, whose output appears as it comes."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from npu_device._src.cluster.time_limits import OUTPUT_SECONDS, POOL_RELEASE_SECONDS
from npu_device._src.collectives import job
from npu_device._src.membership import parent_rank
from npu_device._src.membership.rank_environment import environment_without_job
from npu_device._src.membership.schemes import world_size_from_environment
from npu_device._src.pools import by_value
from npu_device._src.pools.answers import Answer, RankError
from npu_device._src.pools.forked import ForkedProcess
from npu_device._src.pools.pool import Pool

_log = logging.getLogger("npu_device")


def run(function: Callable, *arguments: Any, ranks: int = 2) -> list:
    """Call ``function(*arguments)`` on new processes, the ranks of a job; return the results in order of rank.

    Args:
        function: of a notebook, a script or a module. The functions, classes and variables that it uses travel with it.
        *arguments: for the function. Arrays above 10 MB exist once, and are read-only.
        ranks: how many processes, on this machine. 1 is a process without a job.

    Returns:
        A list with the result of each rank.

    Raises:
        Exception: what the function raised on the first rank that failed, caused by a RankError with the traceback.
        RankError: a rank ended, or its error can't be sent.
        TypeError: not a function; or the function, a variable that it uses, an argument or a result can't be sent.
        ImportError: cloudpickle is missing, the extra ``notebook``.
        RuntimeError: this process is a rank itself.

    The output of the ranks appears as it comes, each line with its rank. An interrupt ends the ranks. There is no time
    limit.
    """
    return call_on_ranks(NotebookPool, function, arguments, ranks)


def call_on_ranks(
    kind: type[NotebookPool], function: Callable, arguments: Sequence, ranks: int
) -> list:
    """Do as ``run``, on ranks of a kind."""
    if not callable(function):
        raise TypeError(f"npu.run takes a function first, not a {type(function).__name__}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected a whole number from 1")
    _require_no_job()
    call, offer = by_value.sent(function, tuple(arguments))
    try:
        pool = kind(ranks)
        output = _Output(pool.processes)
        try:
            answers = pool.ask(by_value.call, (call,), math.inf)
        finally:
            pool.close()
            output.finish()
            # A kernel may make many calls.
            for process in pool.processes:
                process.remove_files()
    finally:
        offer.withdraw()
    errors = {rank: answer.value for rank, answer in answers.items() if not answer.succeeded}
    # The first answer is from the first rank that failed, which may have made others fail.
    for rank, text in errors.items():
        failure = RankError(f"rank {rank} of {ranks}:\n{text}", errors)
        error = _error_of(answers[rank])
        if error is None:
            raise failure
        raise error from failure
    return [pickle.loads(answers[rank].value) for rank in range(ranks)]


def _error_of(answer: Answer) -> Exception | None:
    """Return the error that the function raised on a rank, if it was sent and can be read."""
    with contextlib.suppress(Exception):
        error = pickle.loads(answer.error)
        # The end of a rank must not end the kernel.
        if isinstance(error, Exception):
            return error
    return None


def _require_no_job() -> None:
    is_rank = job.current() is not None or parent_rank.inherited() is not None
    if is_rank or world_size_from_environment() > 1:
        raise RuntimeError(
            "npu.run was called in a job: this process is a rank, or a child of one.\nWhat to do: call the function "
            "itself on every rank; or start the script with python, without npurun."
        )


class NotebookPool(Pool):
    """Ranks with the options and GPUs of this process."""

    ends_as_scripts = True

    def _inherited(self) -> dict[str, str]:
        return environment_without_job()

    def close(self) -> None:
        """End the ranks. After an error, those that don't end by themselves are killed."""
        self.hang_up()
        try:
            if self.has_returned:
                self._wait_for_ends()
        finally:
            # An interrupt ends the wait, too.
            super().close()

    def _wait_for_ends(self) -> None:
        for rank, process in enumerate(self.processes):
            try:
                process.wait(POOL_RELEASE_SECONDS)
            except subprocess.TimeoutExpired:
                _log.warning(
                    "rank %d has returned, but its process hasn't ended: npu.run waits for its threads and for what "
                    "is called at exit. Interrupt it to go on.",
                    rank,
                )
                process.wait(math.inf)


class _RankOutput:
    """What one rank prints."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self._position = 0
        self._beginning = b""  # the part so far of a line that has not ended
        self.bar = ""  # the newest state of a bar, whose line has not ended

    def lines(self) -> list[str]:
        """Return the lines that have ended since the last call."""
        texts = []
        while block := self._process.read(self._position):
            self._position += len(block)
            *lines, self._beginning = (self._beginning + block).split(b"\n")
            texts += [_newest(line) for line in lines]
            if lines:
                self.bar = ""
            if b"\r" in self._beginning:
                self.bar = _newest(self._beginning)
                # Memory must not grow with the states of a bar; a state ends before or after its sign.
                self._beginning = b"\r" + self._beginning[self._beginning.rfind(b"\r", 0, -1) + 1 :]
        return texts

    def rest(self) -> list[str]:
        """Return a last line without an end."""
        if self._beginning:
            return [_newest(self._beginning)]
        return []


def _newest(line: bytes) -> str:
    """Return what is seen of a line in which a bar goes back to the beginning."""
    return line.rstrip(b"\r\b").rpartition(b"\r")[2].decode(errors="replace")


class _Output:
    """A thread that prints what ranks print: whole lines, and the bar of one of them."""

    def __init__(self, processes: Sequence[ForkedProcess]) -> None:
        self._ranks = [_RankOutput(process) for process in processes]
        self._with_bar: int | None = None  # the rank whose bar is in the last line
        self._bar = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Print the rest of the output of ranks that have ended."""
        self._is_over.set()
        self._thread.join()
        for rank, output in enumerate(self._ranks):
            self._show(rank, output.rest(), "")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            # What has come before the end is read once more.
            is_last = self._is_over.wait(OUTPUT_SECONDS)
            for rank, output in enumerate(self._ranks):
                lines = output.lines()
                self._show(rank, lines, output.bar)

    def _show(self, rank: int, lines: list[str], bar: str) -> None:
        text = "".join(f"[{rank}] {line}\n" for line in lines)
        if lines and self._with_bar is not None:
            # The end of the same bar replaces it; lines of a different rank come below it.
            text = ("\r" if self._with_bar == rank else "\n") + text
            self._with_bar = None
        if bar and self._with_bar in (None, rank) and (bar, self._with_bar) != (self._bar, rank):
            text += f"\r[{rank}] {bar}"
            self._with_bar = rank
            self._bar = bar
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
