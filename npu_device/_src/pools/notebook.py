"""``npu.run``: a function of a notebook or script on new processes, whose output appears as it comes."""

from __future__ import annotations

import math
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from npu_device._src.cluster.time_limits import OUTPUT_SECONDS
from npu_device._src.collectives import job
from npu_device._src.membership import parent_rank
from npu_device._src.membership.rank_environment import environment_without_job
from npu_device._src.membership.schemes import world_size_from_environment
from npu_device._src.pools import by_value
from npu_device._src.pools.answers import RankError
from npu_device._src.pools.forked import ForkedProcess
from npu_device._src.pools.pool import Pool


def run(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Call ``function(*arguments)`` on new processes, the ranks of a job; return the results in order of rank.

    Args:
        function: of a notebook, a script or a module. The functions, classes and variables that it uses travel with it.
        *arguments: for the function. Arrays above 10 MB exist once, and are read-only.
        ranks: how many processes, on this machine. 1 is a process without a job.

    Returns:
        A list with the result of each rank.

    Raises:
        RankError: the function failed on a rank: the error of the first one that failed, with its traceback.
        TypeError: the function, a variable that it uses, an argument or a result can't be sent.
        ImportError: cloudpickle is missing, the extra ``notebook``.
        RuntimeError: this process is a rank itself.

    The output of the ranks appears as it comes, each line with its rank. An interrupt ends the ranks. There is no time
    limit.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected a whole number from 1")
    _require_no_job()
    call, offer = by_value.sent(function, arguments)
    try:
        pool = _NotebookPool(ranks)
        output = _Output(pool.processes)
        try:
            answers = pool.ask(by_value.call, (call,), math.inf)
        finally:
            pool.close()
            output.finish()
    finally:
        offer.withdraw()
    errors = {rank: answer.value for rank, answer in answers.items() if not answer.succeeded}
    # The first answer is that of the first rank that failed, by which others may fail.
    for rank, text in errors.items():
        raise RankError(f"rank {rank} of {ranks}:\n{text}", errors)
    return [pickle.loads(answers[rank].value) for rank in range(ranks)]


def _require_no_job() -> None:
    is_rank = job.current() is not None or parent_rank.inherited() is not None
    if is_rank or world_size_from_environment() > 1:
        raise RuntimeError(
            "npu.run was called in a job: this process is a rank, or a child of one.\nWhat to do: call the function "
            "itself on every rank; or start the script with python, without npurun."
        )


class _NotebookPool(Pool):
    """Ranks with the options and GPUs of this process."""

    def _inherited(self) -> dict[str, str]:
        return environment_without_job()


class _Output:
    """A thread that prints what ranks print, in whole lines."""

    def __init__(self, processes: Sequence[ForkedProcess]) -> None:
        self._processes = processes
        self._positions = [0] * len(processes)
        self._beginnings = [b""] * len(processes)  # of lines that have not ended
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Print the rest of the output of ranks that have ended."""
        self._is_over.set()
        self._thread.join()
        # Lines without an end count, too.
        for rank, beginning in enumerate(self._beginnings):
            if beginning:
                self._show(rank, [beginning])

    def _run(self) -> None:
        is_last = False
        while not is_last:
            # What has come before the end is read once more.
            is_last = self._is_over.wait(OUTPUT_SECONDS)
            for rank, process in enumerate(self._processes):
                while block := process.read(self._positions[rank]):
                    self._positions[rank] += len(block)
                    *lines, rest = (self._beginnings[rank] + block).split(b"\n")
                    self._beginnings[rank] = rest
                    self._show(rank, lines)

    def _show(self, rank: int, lines: list[bytes]) -> None:
        # A bar goes back to the begin of its line; only what it has come to is shown.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
        sys.stdout.write("".join(f"[{rank}] {text}\n" for text in texts))
        sys.stdout.flush()
