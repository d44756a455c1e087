"""How the ranks of a group come to a channel, and what a rank looks at while it waits in it."""

from __future__ import annotations

import time

from npu_device.cluster.errors import ClusterError, PeerError
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import Group
from npu_device.collectives.shared_memory import mapping
from npu_device.collectives.shared_memory.channel import Channel, Layout
from npu_device.collectives.shared_memory.host import SECONDS, hosts_of

# A rank that fails or leaves tells the others; its end is looked into only when nothing has been heard for so long.
_SECONDS_FOR_THE_NEWS = 0.3


def connect(runtime: Runtime, group: Group) -> Channel:
    """This rank's end of a group's channel. Whoever comes first makes the memory, so that nobody waits here.

    Raises:
        ClusterError: there is no memory left, or rank 0 doesn't answer.
        PeerError: a rank of the group has failed or ended.
    """
    key = f"channel/{group.name}/{'-'.join(map(str, group.ranks))}"
    size = Layout(group.size).bytes
    look = Waiting(runtime, group).look
    try:
        memory, path = mapping.create(size)
        try:
            runtime.store.set(key, path)
        except KeyError:
            memory.close()
            memory = mapping.attach(runtime.store.get(key, SECONDS), size)
    except (OSError, ValueError) as error:
        look()
        raise ClusterError(
            f"rank {runtime.cluster.rank} on host {runtime.cluster.host} could not get {size >> 20} MiB of memory for "
            f"group {group.name!r}: {error}\n"
            "What to do: free memory, or set NPU_DEVICE_BACKEND=tensorflow on all ranks."
        ) from error
    return Channel(memory, group.size, group.rank, look)


class Waiting:
    """What a rank does now and then while it waits for the others of a group."""

    def __init__(self, runtime: Runtime, group: Group) -> None:
        self._health = runtime.health
        self._cluster = runtime.cluster
        processes = hosts_of(runtime).processes
        self._others = [(rank, *processes[rank]) for rank in group.ranks if rank != runtime.cluster.rank]

    def look(self) -> None:
        """See whether there is still somebody to wait for.

        Raises:
            PeerError: the collectives of this rank were stopped, or the process of a rank has ended.
        """
        self._health.require_running()
        for rank, pid, start in self._others:
            if mapping.process(pid) != start:
                time.sleep(_SECONDS_FOR_THE_NEWS)
                self._health.require_running()
                host = self._cluster.hosts[rank]
                self._health.stop(
                    f"rank {rank} on host {host} is gone: its process {pid} ended or was killed (seen by rank "
                    f"{self._cluster.rank} on host {self._cluster.host}, which waits for it in a collective).\n"
                    f"Look at the output of rank {rank} for the cause."
                )
                self._health.require_running()
                raise PeerError(f"rank {rank} on host {host} is gone")
