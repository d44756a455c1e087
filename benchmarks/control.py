"""The control channel with very many ranks, without TensorFlow: ``python -m benchmarks.control --ranks 1024``.

Uses the real hub, and the client code of every rank, with many ranks per process. Prints a row of a Markdown table: the
time to meet, for a barrier, for the table of a stall, and until all know of a failure; and messages per rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Callable

from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Membership
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.rendezvous import meet

_RANKS_PER_PROCESS = 128
_SECONDS = 120.0
_HEADER = (
    "| ranks | meeting | barrier | stall table | failure known | messages per rank |\n"
    + 6 * "|---"
    + "|"
)


class _Rank:
    """One rank, whose thread goes from step to step together with the others."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.channel: ControlChannel
        self.failed = threading.Event()
        self.failed_at = 0.0

    def meet(self) -> None:
        cluster, self.channel = meet(self.membership)
        assert cluster.rank == self.membership.rank
        self.channel.listen(self._on_push, lambda reason: None)

    def barrier(self) -> None:
        self.channel.gather("benchmark", None, _SECONDS)

    def stall(self) -> None:
        """Ask from all ranks but the last, which is late, where the others are, as the stall watch does."""
        if self.membership.rank == self.membership.world_size - 1:
            return
        body = {
            "group": "hccl_world_group",
            "ranks": f"0-{self.membership.world_size - 1}",
            "begun": 7,
        }
        answers = self.channel.ask("where", body, range(self.membership.world_size), _SECONDS)
        assert len(answers) == self.membership.world_size

    def failure(self) -> None:
        if self.membership.rank == self.membership.world_size // 2:
            event = {"rank": self.membership.rank, "error": "ValueError", "traceback": "x" * 999}
            self.channel.notify("failed", event=event)
        assert self.failed.wait(_SECONDS)

    def leave(self) -> None:
        self.channel.notify("left", issued={"hccl_world_group 0-1023": 7})
        self.channel.close()

    def _on_push(self, message: dict[str, Any]) -> None:
        if message["push"] == "question":
            begun = 6 if self.membership.rank == self.membership.world_size - 1 else 7
            call = {"collective": "all_reduce", "line": "x.py:1"}
            answer = {"begun": begun, "call": call}
            self.channel.notify("reply", question=message["question"], value=answer)
        elif message["push"] == "failed":
            self.failed_at = time.monotonic()
            self.failed.set()


_STEPS = ("meet", "barrier", "stall", "failure", "leave")


def _serve(link: Connection, memberships: list[Membership]) -> None:
    """Run the steps for the ranks of one process: each when told, all ranks at once."""
    ranks = [_Rank(membership) for membership in memberships]
    for step in _STEPS:
        gate = threading.Barrier(len(ranks) + 1)

        def run(act: Callable[[], None], gate: threading.Barrier = gate) -> None:
            gate.wait()
            act()

        threads = [threading.Thread(target=run, args=(getattr(rank, step),)) for rank in ranks]
        for thread in threads:
            thread.start()
        link.send("ready")
        link.recv()
        gate.wait()
        for thread in threads:
            thread.join()
        link.send(max((rank.failed_at for rank in ranks), default=0.0))
    link.send(sum(rank.channel.messages for rank in ranks))


def _measure(ranks: int) -> str:
    secret = os.urandom(32)
    hub = HubProcess(
        secret=secret,
        hosts=("127.0.0.1",),
        ports=(0, 0),
        job_id="benchmark",
        world_size=ranks,
        expected_hosts=(),
        host_key="here",
        stays=True,
    )
    seconds: dict[str, float] = {}
    memberships = [
        Membership(
            scheme="rank table",
            world_size=ranks,
            rank=rank,
            host=None,
            host_key="here",
            device_id=rank,
            is_chief=False,
            chief_hosts=("127.0.0.1",),
            chief_port=hub.port,
            job_id="benchmark",
            connect_timeout=_SECONDS,
            expected_hosts=("here",) * ranks,
            secret=secret,
        )
        for rank in range(ranks)
    ]
    links, processes = [], []
    for first in range(0, ranks, _RANKS_PER_PROCESS):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=_serve, args=(theirs, memberships[first : first + _RANKS_PER_PROCESS])
        )
        process.start()
        links.append(ours)
        processes.append(process)
    for step in _STEPS:
        for link in links:
            link.recv()
        began = time.monotonic()
        for link in links:
            link.send("go")
        ends = [link.recv() for link in links]
        seconds[step] = (max(ends) if step == "failure" else time.monotonic()) - began
    messages = sum([link.recv() for link in links]) / ranks
    for process in processes:
        process.join()
    hub.close()
    cells = [f"{seconds[name]:.2f} s" for name in _STEPS[:-1]]
    return f"| {ranks} | {' | '.join(cells)} | {messages:.1f} |"


def main() -> None:
    """Measure with the numbers of ranks on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    print(_HEADER)
    for ranks in parser.parse_args().ranks:
        print(_measure(ranks), flush=True)


if __name__ == "__main__":
    main()
