"""What the engines of a job share: the roster, the way to the other ranks, buffers, and the counts of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.peers import Peers
from npu_device._src.collectives.call_count import CallCounts
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.mpi_world import MpiWorld
from npu_device._src.collectives.hosts_of_job import JobHosts

_LOCAL = "/job:localhost/replica:0/task:0"
_MOST_MESSAGE_BYTES = 1024


class EngineContext:
    """What engines need of the job. ``Job`` derives from it.

    Attributes:
        control: the control channel: key-value store, gathers and barrier.
        health: raises when waiting is pointless.
        peers: direct connections to the other ranks; they have to be opened.
        counts: how many transfers of each group this rank has begun and ended.
        hosts: which ranks share memory, and all ranks' devices; set once, when the ranks have met.
        task: TensorFlow's name of this process; changes when TensorFlow's server starts.
        server_addresses: each rank's ``host:port`` of TensorFlow's server; empty if this job has none.
        cores: this rank's share of the cores of its host, 1 or more; set when TensorFlow's threads are divided.
        has_own_core: that share is a whole core or more, not less; set at the same time.
        most_message_bytes: the most data of a rank that travel in the message that compares a call.
        at_exit: called when this process exits, after it has left the job; not in a forked child.
        making: held by whoever makes one of the objects that exist once per rank, each at its first use.
    """

    hosts: JobHosts

    def __init__(self, cluster: Cluster, channel: ControlChannel, secret: bytes) -> None:
        self.cluster = cluster
        self.control = channel
        self.health = Health(cluster, channel)
        self.peers = Peers(cluster, channel, self.health, secret)
        self.counts = CallCounts()
        self.buffers = BufferPool()
        self.mpi_world: MpiWorld | None = None
        self.task = _LOCAL
        self.server_addresses: tuple[str, ...] = ()
        self.cores = 1
        self.has_own_core = False
        self.most_message_bytes = _MOST_MESSAGE_BYTES
        self.at_exit: list[Callable[[], None]] = []
        self.making = threading.RLock()

    def device(self, device_type: str) -> str:
        """Return the full name of this rank's first device of a kind (``"CPU"`` or ``"GPU"``)."""
        return f"{self.task}/device:{device_type}:0"
