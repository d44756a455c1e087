"""How the failure or the leaving of one rank reaches all the others.

A rank that ends with an uncaught exception says so in the event log; a rank whose script is over says how many
collectives it took part in. Everybody else raises: at once when a collective is pending, or when the next one is
called. A rank that is killed can't say anything; TensorFlow's coordination service misses its heartbeats then and
aborts the collectives by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Callable

import tensorflow as tf

from npu_device import _compat, environment
from npu_device.cluster.description import Cluster
from npu_device.cluster.errors import ClusterError, PeerError
from npu_device.cluster.events import EventLog
from npu_device.cluster.store import Store

_GroupId = tuple[str, tuple[int, ...]]  # name and members: disjoint sets of ranks may use one name

_TRACEBACK_LINES = 12
_POLL_SECONDS = 0.2
_NOTICE_AFTER_SECONDS = 10.0


class Health:
    """What this rank knows of the others, and how it tells them about itself."""

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._left: dict[int, dict[_GroupId, int]] = {}
        self._failed: set[int] = set()
        self._groups: dict[_GroupId, Callable[[], int]] = {}
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._somebody_left = threading.Event()
        self._closing = False
        self._lost = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        # Now: from Python 3.12 on no thread can be started while the interpreter shuts down, which is when ranks leave.
        threading.Thread(target=self._watch_for_the_left, name="npu_device-left", daemon=True).start()
        self._events = EventLog(store, self._on_event, self._on_lost)

    # What the collectives ask and say

    def count_collectives_with(self, group: str, ranks: Sequence[int], issued: Callable[[], int]) -> None:
        """Say how the collectives that this rank has begun in a group are counted, and who is in the group."""
        self._groups[group, tuple(ranks)] = issued

    def check(self, group: str, ranks: Sequence[int]) -> None:
        """Before another collective of this rank in a group.

        Raises:
            PeerError: a rank has failed, or one of the group has left and takes no part in it.
        """
        if self._failure is None and self._left:
            text = self._missed((group, tuple(ranks)), coming=1)
            if text is not None:
                raise PeerError(text)
        self.require_running()

    def require_running(self) -> None:
        """While this rank waits in a collective.

        Raises:
            PeerError: a rank has failed, or this rank's collectives were stopped.
        """
        if self._failure is not None:
            raise PeerError(self._failure)

    def stop(self, text: str) -> None:
        """End the collectives of this rank, pending and later ones, with an error of this text."""
        self._abort(text)

    # What the ranks tell each other

    def on_event(self, kind: str, act: Callable[[dict[str, Any]], None]) -> None:
        """Have events of a kind of the caller's own acted on, in the event log's thread."""
        self._handlers[kind] = act

    def tell(self, event: dict[str, Any]) -> None:
        """Tell every rank, this one too, something; if rank 0 is gone nobody hears it."""
        with contextlib.suppress(ClusterError):
            self._events.append(event)

    @property
    def is_over(self) -> bool:
        """True when this rank is closing or its collectives have been stopped."""
        return self._closing or self._failure is not None

    # What happened to the others

    def _on_event(self, event: dict[str, Any]) -> None:
        rank = event["rank"]
        if event["kind"] == "left":
            if rank != self._cluster.rank:
                self._left[rank] = {(name, tuple(ranks)): issued for name, ranks, issued in event["issued"]}
                self._somebody_left.set()
        elif event["kind"] in ("failed", "stopped"):
            self._failed.add(rank)
            if event["kind"] == "failed" and rank != self._cluster.rank:
                self._abort(self._failed_text(event))
        elif event["kind"] in self._handlers:
            self._handlers[event["kind"]](event)

    def _watch_for_the_left(self) -> None:
        """That somebody has left is fine as long as this rank begins no collective that the other has a part in."""
        self._somebody_left.wait()
        while not self._closing and self._failure is None:
            for group in list(self._groups):
                text = self._missed(group)
                if text is not None:
                    self._abort(text)
                    return
            time.sleep(_POLL_SECONDS)

    def _missed(self, group: _GroupId, coming: int = 0) -> str | None:
        """What to say when a rank of the group has left before this rank's latest (or coming) collective in it."""
        issued = self._groups[group]() + coming if group in self._groups else coming
        for rank in group[1]:
            if rank in self._left and issued > self._left[rank].get(group, 0):
                return self._left_text(rank, self._left[rank].get(group, 0), group[0])
        return None

    def _on_lost(self, error: ClusterError) -> None:
        self._lost = True
        if not self._closing:
            self._abort(
                f"rank 0 on host {self._cluster.hosts[0]} is gone: its process ended, was killed, or can't be reached "
                "any more "
                f"(seen by {self._me()}).\nLook at the output of rank 0 for the cause. ({error})"
            )

    def _abort(self, text: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = text
        _compat.eager_context().abort_collective_ops(tf.errors.UNAVAILABLE, text)

    def _me(self) -> str:
        return f"rank {self._cluster.rank} on host {self._cluster.host}"

    def _left_text(self, rank: int, issued: int, group: str) -> str:
        return (
            f"rank {rank} on host {self._cluster.hosts[rank]} has left the job: its script ended after {issued} "
            "collective operations in "
            f"group {group!r}, while {self._me()} called number {issued + 1}.\n"
            "Likely cause: the ranks run different numbers of steps (uneven data, another step count, an early stop "
            "on one rank).\n"
            "What to do: give every rank the same number of steps, for instance dataset.repeat() with a fixed "
            "steps_per_epoch."
        )

    def _failed_text(self, event: dict[str, Any]) -> str:
        return (
            f"rank {event['rank']} on host {event['host']} failed: {event['error']}\n"
            f"The end of its traceback:\n{event['traceback']}\n"
            f"{self._me()} stops because of it. Mend the error of rank {event['rank']}; its output has the whole "
            "traceback."
        )

    # What happened to this rank

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = traceback.format_exception(kind, error, trace)
        secondary = (
            self._failure is not None or isinstance(error, PeerError) or "Collective ops is aborted" in str(error)
        )
        summary = "".join(traceback.format_exception_only(kind, error)).strip()
        record = {
            "kind": "failed",
            "time": time.time(),
            "rank": self._cluster.rank,
            "host": socket.gethostname(),
            "error": summary,
            "secondary": secondary,
        }
        self._write_record({**record, "traceback": "".join(lines)})
        if not secondary and not self._closing:
            tail = "\n".join("".join(lines).rstrip().splitlines()[-_TRACEBACK_LINES:])
            try:
                self._events.append({**record, "traceback": tail})
            except ClusterError as lost:
                print(f"npu_device: {self._me()} could not tell the others of its failure: {lost}", file=sys.stderr)
        elif not self._lost:
            self.tell({"kind": "stopped", "rank": self._cluster.rank})  # a rank 0 that has finished waits no longer
        with self._lock:
            self._failure = self._failure or summary
        self._previous_hook(kind, error, trace)

    def _write_record(self, record: dict[str, Any]) -> None:
        """Leave the failure for the launcher, which prints the first one in time."""
        path = environment.NPU_DEVICE_ERROR_FILE.get()
        if path is None:
            return
        try:
            with open(path + ".part", "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(path + ".part", path)
        except OSError as error:
            print(f"npu_device: could not write {path}: {error}", file=sys.stderr)

    # The end

    def leave(self) -> None:
        """Tell the others that this rank takes part in nothing more; rank 0 then waits for them, since the service
        lives in it.
        """
        self._closing = True
        self._somebody_left.set()  # the watch ends, too
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        if self._failure is not None or self._lost:
            return
        try:
            issued = [(name, ranks, count()) for (name, ranks), count in self._groups.items()]
            self._events.append({"kind": "left", "rank": self._cluster.rank, "issued": issued})
        except ClusterError:
            return  # rank 0 is gone; there is nobody to tell
        if self._cluster.rank == 0:
            self._wait_for_the_others()

    def _wait_for_the_others(self) -> None:
        began = time.monotonic()
        noticed = False
        while waiting := self._present():
            if not noticed and time.monotonic() - began > _NOTICE_AFTER_SECONDS:
                noticed = True
                print(
                    f"npu_device: rank 0 has finished and waits for rank(s) {', '.join(map(str, waiting))}: "
                    "the job's coordination service lives in rank 0.",
                    file=sys.stderr,
                )
            time.sleep(_POLL_SECONDS)

    def _present(self) -> list[int]:
        gone = set(self._left) | self._failed
        waiting = [rank for rank in range(1, self._cluster.world_size) if rank not in gone]
        if waiting:
            states = _compat.eager_context().get_task_states([("worker", self._cluster.world_size)])
            waiting = [rank for rank in waiting if states[rank] is None]
        return waiting
