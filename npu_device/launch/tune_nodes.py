"""Keep the nodes of ``npurun --tune`` in step: node 0 leads, and the others run what it announces.

They share a directory for the traces. Node 0 leaves there where it listens, and the others connect to it. So files that
an earlier tuning has left aren't mistaken for the leader's, and each node notices when the leader is gone.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.ports import listen_on_free
from npu_device.launch import node_links
from npu_device.launch.node_links import Link

_POLL_SECONDS = 0.2
_MEETING_SECONDS = 120.0
_GRACE_SECONDS = 5.0  # when a run fails everywhere, each node ends with what it has seen itself
_SESSION = "session.json"
_OVER: dict[str, Any] = {}  # instead of a run
_REMEDY = "What to do: run npurun --tune on every node, in a working directory that all nodes share."
_LOOK = "What to do: look at its output, and start again on every node."


@dataclass(frozen=True)
class TuningRun:
    """The next run of every node.

    Attributes:
        name: name of the run.
        measuring: arguments of ``launch.measuring``; None for the script.
        ends: the split to try; None for the script's own.
        iterations: traced iterations after which the script is stopped.
        key: the same on all nodes, and different for every run.
    """

    name: str
    measuring: list[str] | None
    ends: list[int] | None
    iterations: int
    key: str = field(default_factory=lambda: secrets.token_hex(6))


class TuningLeader:
    """Node 0's side; a context manager that tells the others when the tuning is over. On a single node it does nothing.

    When it is left by an exception, the others aren't told, and end with an error.

    Args:
        directory: the directory that the nodes share.
        nnodes: number of nodes.
        address: address of this node, by which the others reach it.

    Raises:
        OSError: on entering, if not all nodes have come.
    """

    def __init__(self, directory: Path, nnodes: int, address: str) -> None:
        self._directory = directory
        self._others = range(1, nnodes)
        self._address = address
        self._links: dict[int, Link] = {}
        self._lost: dict[int, float] = {}  # when each node's connection was lost

    def __enter__(self) -> TuningLeader:
        if not self._others:
            return self
        secret = secrets.token_hex(16)
        session = self._directory / _SESSION
        session.touch(mode=0o600)
        with listen_on_free(environment.NPU_DEVICE_PORT_RANGE.get(), (self._address,)) as listener:
            session.write_text(json.dumps({"port": listener.getsockname()[1], "secret": secret}), encoding="utf-8")
            node_links.serve(listener, secret.encode(), self._joined)
            try:
                self._wait_for_others()
            finally:
                listener.shutdown(socket.SHUT_RDWR)
        return self

    def announce(self, tuning_run: TuningRun) -> None:
        """Tell the other nodes about the next run."""
        self._send(asdict(tuning_run))

    def check(self) -> None:
        """Raise OSError if another node is gone, to be called while a run goes on."""
        gone = [str(node) for node, when in sorted(self._lost.items()) if time.monotonic() > when + _GRACE_SECONDS]
        if gone:
            raise OSError(
                f"node(s) {', '.join(gone)} ended before the tuning was over: npurun failed or was stopped there, or "
                f"the host can't be reached any more.\n{_LOOK}"
            )

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._send(_OVER)
        for link in self._links.values():
            link.close()

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + _MEETING_SECONDS
        while missing := [str(node) for node in self._others if node not in self._links]:
            if time.monotonic() > deadline:
                where = f"{self._directory} within {_MEETING_SECONDS:g} s"
                raise OSError(f"node(s) {', '.join(missing)} did not come to {where}.\n{_REMEDY}")
            time.sleep(_POLL_SECONDS)

    def _joined(self, link: Link) -> None:
        node = link.greeting["node"]
        if node not in self._others:
            raise ValueError("no such node")
        self._links[node] = link
        for _ in link.messages():
            pass  # it says nothing; this ends with the connection
        self._lost[node] = time.monotonic()

    def _send(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            link.send(message)


class TuningFollower:
    """Another node's side: iterates over the runs of the leader.

    Args:
        directory: the directory that the nodes share.
        node: number of this node.
        address: address of node 0.

    Raises:
        OSError: on iterating, if the leader doesn't come, or is gone or silent before the tuning is over.
    """

    def __init__(self, directory: Path, node: int, address: str) -> None:
        self._directory = directory
        self._node = node
        self._address = address
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lost: float | None = None  # when the connection was lost

    def __iter__(self) -> Iterator[TuningRun]:
        limit = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        with contextlib.closing(self._connect()) as link:
            threading.Thread(target=self._receive, args=[link], name="npurun-tune", daemon=True).start()
            while (message := self._next(limit)) != _OVER:
                yield TuningRun(**message)

    def check(self, grace: float = _GRACE_SECONDS) -> None:
        """Raise OSError if node 0 has been gone for this many seconds, to be called while a run goes on."""
        if self._lost is not None and time.monotonic() > self._lost + grace:
            raise OSError(
                "node 0 ended before the tuning was over: npurun failed or was stopped there, or the host can't be "
                f"reached any more.\n{_LOOK}"
            )

    def _receive(self, link: Link) -> None:
        message = None
        for message in link.messages():
            self._messages.put(message)
        if message != _OVER:
            self._lost = time.monotonic()

    def _next(self, limit: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=_POLL_SECONDS)
            self.check(grace=0)
        raise OSError(f"node 0 has been silent for {limit:g} s (NPU_DEVICE_STALL_TIMEOUT).\n{_LOOK}")

    def _connect(self) -> Link:
        deadline = time.monotonic() + _MEETING_SECONDS
        while True:
            try:
                session = json.loads((self._directory / _SESSION).read_text(encoding="utf-8"))
                return node_links.connect(self._address, session["port"], session["secret"].encode(), node=self._node)
            except (OSError, ValueError, KeyError) as error:  # it isn't there yet, or an earlier tuning's
                if time.monotonic() > deadline:
                    raise OSError(
                        f"node 0 did not come to {self._directory} within {_MEETING_SECONDS:g} s: {error}.\n{_REMEDY}"
                    ) from error
            time.sleep(_POLL_SECONDS)
