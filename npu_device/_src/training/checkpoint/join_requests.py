"""Requests of npurun that rank 0 reads: all ranks are to end after a step, so that more nodes can join the job."""

from __future__ import annotations

import contextlib
import os
import sys

from npu_device._src import environment
from npu_device._src.training.distribute.dataset import divided_batches
from npu_device._src.world.world import World


class JoinRequests:
    """The pipe of the requests, open as long as the ranks can end after a step."""

    def __init__(self, path: str) -> None:
        self._path = path
        # A pipe without writers would be ready for reading all the time, so this process is a writer, too.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._refused = set[int]()

    def accept(self) -> bool:
        """Read the newest request; return whether the ranks are to end for it, and print a line that tells it."""
        requests = os.read(self.descriptor, 4096).split()
        size = int(requests[-1])
        undivided = sorted(batch for batch in divided_batches if batch % size)
        if not undivided:
            _say(f"all ranks finish the step, and start again as {size} ranks")
        elif size not in self._refused:
            self._refused.add(size)
            _say(
                f"the job can't go on with {size} ranks, which don't divide the global batch of {undivided[0]} "
                "samples: nodes that have come wait for the next restart"
            )
        return not undivided

    def grant(self) -> None:
        """Tell npurun, by removing the pipe, that the ranks end for a node, and not by themselves."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def close(self) -> None:
        os.close(self.descriptor)


def join_requests(world: World | None) -> JoinRequests | None:
    """Open the pipe on rank 0; None if npurun lets no nodes join."""
    path = environment.NPU_DEVICE_JOIN_REQUESTS.get()
    is_asked = world is None or world.is_main
    # There is no pipe where the number of nodes is fixed.
    if path is None or not is_asked or not os.path.exists(path):
        return None
    return JoinRequests(path)


def _say(text: str) -> None:
    print(f"npu_device: a node has come: {text}", file=sys.stderr, flush=True)
