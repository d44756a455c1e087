"""What an attempt gets: what the attempts of this launcher share, and a rendezvous, where its ranks meet."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from npu_device._src import environment
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership.schemes import secret
from npu_device._src.training.checkpoint.memory_slots import Memory
from npu_device.launch.arguments import DEFAULT_PORT, Options
from npu_device.launch.binding import Binding
from npu_device.launch.events import Events
from npu_device.launch.guard import RankGuard
from npu_device.launch.node_protocol import AttemptPlan
from npu_device.launch.output import Console
from npu_device.launch.reports import Reporter

# Exit codes of npurun
FAILED = 1
USAGE = 2
CANNOT_START = 126
# Errors that keep a job from starting, of which the user is told no more than the text.
START_ERRORS = (OSError, ClusterError, ValueError)


@dataclass
class Launch:
    options: Options
    console: Console
    guard: RankGuard
    directory: str
    events: Events
    reporter: Reporter
    copy_memory: Memory | None  # None if several nodes can't restart
    secret: bytes = field(repr=False)  # of the job, as the user has given it
    binding: Binding = field(init=False)

    def __post_init__(self) -> None:
        self.binding = Binding(self.options)

    @property
    def progress_file(self) -> str:
        return os.path.join(self.directory, "progress")

    @property
    def join_requests(self) -> str:
        """The path of the pipe by which rank 0, on node 0, is asked to end the attempt for a node."""
        return os.path.join(self.directory, "joins")

    def step(self) -> str | None:
        """Return the step of the newest checkpoint, as far as rank 0, on this node, has reported it, or of a copy."""
        progress = None
        with contextlib.suppress(OSError):
            text = Path(self.progress_file).read_text(encoding="utf-8", errors="replace")
            progress = text.strip()[:40] or None
        copied = None if self.copy_memory is None else self.copy_memory.step()
        # A script may write anything into the file.
        if copied is None or (progress is not None and not progress.isdecimal()):
            return progress
        return str(max(copied, int(progress or 0)))


@dataclass(frozen=True)
class Rendezvous:
    """The plan of an attempt, and what only this node has; a context manager that lets the hub end."""

    plan: AttemptPlan
    hub: HubProcess | None = None  # None if node 0 has it
    # Made for a job whose user has given no secret.
    new_secret: str | None = field(default=None, repr=False)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hub is not None:
            self.hub.close()

    def end(self) -> None:
        """End the hub at once, so that no rank of this attempt continues."""
        if self.hub is not None:
            self.hub.end()


def prepare_rendezvous(options: Options, count: int, nodes: Sequence[int] = ()) -> Rendezvous:
    """Return the rendezvous of an attempt, with its hub on node 0."""
    nodes = tuple(nodes or range(options.nnodes))
    is_single = options.nnodes == 1
    hub_secret = secret()
    new_secret = None
    if is_single and not hub_secret:
        # Several nodes can't agree on a secret by themselves: the user has to give it.
        new_secret = secrets.token_hex(32)
        hub_secret = new_secret.encode()
    port = master_port(options)
    job_id = options.job_id or environment.JOB_ID.raw()
    if not job_id and is_single:
        job_id = f"npurun-{secrets.token_hex(6)}"
    elif not job_id:
        # Every node must arrive at the same name by itself.
        job_id = "npurun-" + re.sub(r"[^A-Za-z0-9_-]", "-", f"{options.master_addr}-{port}")
    if count:
        job_id += f"-restart{count}"
    address = options.master_addr
    # Nobody outside may connect to a job of one node.
    if is_single:
        address = "127.0.0.1"
    hub = None
    if options.node_rank == 0:
        ports = port, port
        # The nodes of a job that is started again meet at the port themselves, and tell each other the port of the hub.
        if options.nodes_meet or (is_single and options.master_port is None):
            ports = environment.NPU_DEVICE_PORT_RANGE.get() or (0, 0)
        hub = HubProcess(
            secret=hub_secret,
            hosts=(address,),
            ports=ports,
            job_id=job_id,
            world_size=len(nodes) * options.nproc_per_node,
            expected_hosts=[f"node{node}" for node in nodes for _ in range(options.nproc_per_node)],
            host_key="node0",
            stays=True,
        )
        # The system may have chosen it.
        port = hub.port
    return Rendezvous(AttemptPlan(count, nodes, job_id, port), hub, new_secret)


def master_port(options: Options) -> int:
    allowed_ports = environment.NPU_DEVICE_PORT_RANGE.get() or (DEFAULT_PORT, DEFAULT_PORT)
    return options.master_port or allowed_ports[0]
