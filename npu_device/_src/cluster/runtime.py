"""The job as this rank sees it after the rendezvous: started once per process, closed at exit."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Callable

from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.errors import ClusterError, PeerError
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.peers import Peers

NEW_PROCESS = (
    "What to do if a cluster starts one job after another: let it start new processes for each. With Spark, set "
    "spark.python.worker.reuse=false."
)
_LOCAL = "/job:localhost/replica:0/task:0"

_log = logging.getLogger("npu_device")


class Runtime:
    """The running cluster.

    Args:
        cluster: the ranks, their hosts and addresses.
        channel: the control channel.
        serves_others: the others need this process until they have finished, because the hub is its child.
        secret: the job's secret.

    Attributes:
        cluster: the ranks, their hosts and addresses.
        store: key-value store, gathers and barrier.
        health: failures of the ranks, events and questions.
        peers: direct connections to the other ranks; they have to be opened.
        task: TensorFlow's name of this process; changes when TensorFlow's server starts.
        cores: this rank's share of its host's cores, 1 or more; set when TensorFlow's threads are divided.
        has_own_core: that share is a whole core or more, not less; set at the same time.
        serves_others: the others need this process until they have finished; it waits for them at its end.
        before_leaving: called with the runtime before this process leaves the job; not in a forked child.
    """

    def __init__(self, cluster: Cluster, channel: ControlChannel, serves_others: bool, secret: bytes) -> None:
        self.cluster = cluster
        self.store = channel
        self.health = Health(cluster, channel)
        self.peers = Peers(cluster, self.health, secret)
        self.task = _LOCAL
        self.cores = 1
        self.has_own_core = False
        self._pid = os.getpid()
        self.serves_others = serves_others
        self.before_leaving: list[Callable[[Runtime], None]] = []

    @property
    def is_parents(self) -> bool:
        """Return True in a forked child, which must not leave the job at its exit."""
        return self._pid != os.getpid()

    def device(self, kind: str) -> str:
        """Return the full name of this rank's first device of a kind (``"CPU"`` or ``"GPU"``)."""
        return f"{self.task}/device:{kind}:0"


_runtime: Runtime | None = None
_closed_by: int | None = None


def current() -> Runtime | None:
    """Return the runtime of this process; None before ``start`` and after ``close``."""
    return _runtime


def require_unclosed() -> None:
    """Refuse to join a job a second time.

    Raises:
        ClusterError: the runtime has been closed in this process.
    """
    if _closed_by == os.getpid():
        raise ClusterError(
            "npu_device has been closed in this process, and a process can join its job only once.\n"
            "What to do in a script: call npu.close() only at its end, or not at all: it also runs at exit.\n"
            f"{NEW_PROCESS}"
        )


def start(cluster: Cluster, channel: ControlChannel, serves_others: bool, secret: bytes = b"") -> Runtime:
    """Start the runtime of a job; see ``Runtime`` for the arguments."""
    global _runtime
    _runtime = Runtime(cluster, channel, serves_others, secret)
    atexit.register(_exit)
    _log.info("rank %d of %d on host %s is ready", cluster.rank, cluster.world_size, cluster.host)
    return _runtime


def abandon(error: BaseException) -> PeerError | None:
    """Leave the job because of an error before the first collective, and tell the others.

    Returns:
        The error of another rank, if that was the cause.
    """
    global _runtime, _closed_by
    runtime, _runtime = _runtime, None
    assert runtime is not None
    _closed_by = os.getpid()
    runtime.peers.close()
    return runtime.health.give_up(error)


def close() -> None:
    """Leave the job normally; also runs at exit. Does nothing without a runtime or in a forked child.

    The rank that the others depend on waits for them.
    """
    global _runtime, _closed_by
    runtime = _runtime
    if runtime is None or runtime.is_parents:
        _runtime = None
        return
    try:
        for act in runtime.before_leaving:
            act(runtime)
        runtime.peers.deliver()
    finally:
        _runtime, _closed_by = None, os.getpid()
        runtime.health.leave(runtime.serves_others)
        runtime.peers.close()


_at_exit: list[Callable[[], None]] = []


def on_exit(act: Callable[[], None]) -> None:
    """Call a function when this process exits, after it has left the job; not in a forked child."""
    pid = os.getpid()
    _at_exit.append(lambda: act() if os.getpid() == pid else None)


def _exit() -> None:
    close()
    for act in _at_exit:
        act()
