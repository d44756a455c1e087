"""The nodes that come while the job of ``MIN:MAX`` nodes runs: when they join it, and the request to its ranks.

Rank 0 reads the requests from a named pipe, as long as its script has a ``JobCheckpoint`` or ``FitCheckpoint``. All
ranks then end after the same step, resumable, and rank 0 removes the pipe: by that, their end is told from one that the
script has chosen. Without a reader, or if rank 0 refuses, the nodes wait for a restart.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

from npu_device._src.cluster.time_limits import (
    JOIN_ASK_SECONDS,
    JOIN_PAUSE_SECONDS,
    JOIN_SETTLED_SECONDS,
)
from npu_device._src.wording import ranges
from npu_device.launch.preparation import Launch


class Joins:
    """The joins of a job, on node 0.

    Attributes:
        is_asked: the ranks of the running attempt have been asked to end for a node.
    """

    def __init__(self, launch: Launch) -> None:
        self.is_asked = False
        self._options = launch.options
        self._path = launch.join_requests
        self._is_allowed = launch.options.takes_nodes
        self._count = 0  # how often the job has changed its size for a node
        self._next_request = 0.0  # when the ranks may be asked again
        self._joined = set[int]()  # nodes of this attempt that the one before hadn't
        self._joined_at = 0.0
        # How long a node that fails soon after it joined is kept out, and until when.
        self._pauses: dict[int, float] = {}
        self._kept_out: dict[int, float] = {}
        self._make_pipe()

    def _make_pipe(self) -> None:
        if self._is_allowed and not os.path.exists(self._path):
            try:
                # A cleaner of old files may have removed the folder.
                os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
                os.mkfifo(self._path, 0o600)
            except OSError:
                # Some file systems have no pipes: nodes wait for restarts.
                self._is_allowed = False

    @property
    def is_granted(self) -> bool:
        """Return whether the ranks of the running attempt end, or have ended, for a node."""
        # Without a request, something else has removed the pipe.
        return self.is_asked and not os.path.exists(self._path)

    def ready(self, nodes: Collection[int]) -> set[int]:
        """Return the nodes that may take part in an attempt now."""
        time_now = time.monotonic()
        return {node for node in nodes if self._kept_out.get(node, 0.0) <= time_now}

    def may_join(self, nodes: Collection[int]) -> bool:
        """Return whether some of these nodes may join a running attempt, now or later."""
        limit = self._options.max_resizes
        return bool(nodes) and self._is_allowed and (limit is None or self._count < limit)

    def due_at(self, nodes: Collection[int]) -> float | None:
        """Return when the ranks are to be asked to end for some of these nodes; None if never."""
        if not self.may_join(nodes):
            return None
        admitted_at = min(self._kept_out.get(node, 0.0) for node in nodes)
        return max(admitted_at, self._next_request)

    def plan(self, running: Collection[int], nodes: Collection[int]) -> str:
        """Return what nodes that have come while others run are told."""
        text = f"the job is running on node(s) {ranges(running)}; this node joins"
        due_at = self.due_at(nodes)
        if due_at is None:
            return f"{text} at the next restart"
        if self.is_asked:
            return (
                f"{text} when the ranks have finished a step; if they refuse, at the next restart"
            )
        seconds = due_at - time.monotonic()
        if seconds > JOIN_ASK_SECONDS:
            return f"{text} in {seconds:.0f} s, or at the next restart"
        return (
            f"{text} at the next restart, or when the script has a FitCheckpoint or JobCheckpoint"
        )

    def ask(self, running: Collection[int], nodes: Collection[int]) -> None:
        """Ask the ranks to end after a step, so that more nodes can join."""
        # A request that finds no reader, or ranks that can't end now, is made again.
        self._next_request = time.monotonic() + JOIN_ASK_SECONDS
        count = len({*running, *self.ready(nodes)}) * self._options.nproc_per_node
        # Without a reader the pipe can't be opened.
        with contextlib.suppress(OSError):
            pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, f"{count}\n".encode())
                self.is_asked = True
            finally:
                os.close(pipe)

    def begin(self, joined: Collection[int]) -> None:
        """Note the nodes that an attempt has in addition to those of the one before."""
        time_now = time.monotonic()
        # A node may have gone again before the ranks had ended.
        if self.is_granted and joined:
            self._count += 1
            self._next_request = time_now + JOIN_PAUSE_SECONDS
        self.is_asked = False
        self._make_pipe()
        self._joined = set(joined)
        self._joined_at = time_now

    def suspects(self, running: Collection[int]) -> tuple[int, ...]:
        """Return the nodes without which a failed attempt would go on, as they have joined a short time ago."""
        if time.monotonic() - self._joined_at > JOIN_SETTLED_SECONDS:
            # These nodes have lasted: the next pause of one that fails is the first, short one again.
            for node in self._joined:
                self._pauses.pop(node, None)
            return ()
        if len(running) - len(self._joined) < self._options.fewest_nodes:
            return ()
        return tuple(sorted(self._joined))

    def keep_out(self, nodes: Collection[int]) -> None:
        """Let nodes that failed soon after they joined wait, each time twice as long."""
        for node in nodes:
            pause = self._pauses.get(node, JOIN_PAUSE_SECONDS)
            self._pauses[node] = 2 * pause
            self._kept_out[node] = time.monotonic() + pause
