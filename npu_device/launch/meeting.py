"""The rendezvous of an attempt: the name of the job, its secret, its ranks, and its hub, which node 0 starts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable

from npu_device._src import environment
from npu_device._src.cluster.handshake import NO_SECRET
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.membership.schemes import secret
from npu_device.launch.arguments import DEFAULT_PORT, Options


@dataclass(frozen=True)
class Meeting:
    """The data that the ranks need for the rendezvous; a context manager that lets the hub end."""

    job_id: str  # name of the job, another one in each attempt, so that leftovers of an earlier one can't join
    port: int
    made_secret: str | None = field(repr=False)
    hub: HubProcess | None  # the hub; None if node 0 has it
    nodes: tuple[int, ...]  # numbers of the nodes that take part, in order; the ranks are numbered in that order
    count: int = 0  # how often the job has been started again

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hub is not None:
            self.hub.close()

    def end(self) -> None:
        """End the hub at once, so that no rank of this attempt continues."""
        if self.hub is not None:
            self.hub.end()


def prepare(options: Options, say: Callable[[str], None], count: int = 0, nodes: Sequence[int] = ()) -> Meeting:
    nodes = tuple(nodes or range(options.nnodes))
    given = secret()
    made = secrets.token_hex(32) if not given and options.nnodes == 1 else None
    port = master_port(options)
    if options.nnodes > 1 and not given and options.node_rank == 0 and count == 0:
        say(NO_SECRET)
    job_id = options.job_id or environment.JOB_ID.raw()
    if not job_id and options.nnodes == 1:
        job_id = f"npurun-{secrets.token_hex(6)}"
    elif not job_id:  # every node must arrive at the same name by itself
        job_id = "npurun-" + re.sub(r"[^A-Za-z0-9_-]", "-", f"{options.master_addr}-{port}")
    if count:
        job_id += f"-restart{count}"
    if options.node_rank > 0:
        return Meeting(job_id, port, None, None, nodes, count)
    # The nodes of a job that is started again meet at the port themselves, and tell each other that of the hub.
    chooses = options.nodes_meet or (options.nnodes == 1 and options.master_port is None)
    hub = HubProcess(
        secret=made.encode() if made else given,
        listen=("127.0.0.1",) if options.nnodes == 1 else (options.master_addr,),
        ports=(environment.NPU_DEVICE_PORT_RANGE.get() or (0, 0)) if chooses else (port, port),
        job_id=job_id,
        world_size=len(nodes) * options.nproc_per_node,
        expected_hosts=[f"node{node}" for node in nodes for _ in range(options.nproc_per_node)],
        host_key="node0",
        stays=True,
    )
    return Meeting(job_id, hub.port, made, hub, nodes, count)


def master_port(options: Options) -> int:
    allowed = environment.NPU_DEVICE_PORT_RANGE.get()
    return options.master_port or (allowed or (DEFAULT_PORT,))[0]
