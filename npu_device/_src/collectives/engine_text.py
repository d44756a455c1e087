"""Which engine serves a group, and which ports it opens, in words: for the messages at the start, ``npurun check`` and
the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.engines.engines import TwoLevelEngine
from npu_device._src.collectives.gpu_choice import UNVERIFIED
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.wording import shortened

_SHOWN_PORTS = 8


def engine_name(job: Job, group: Group, dtypes: Iterable[tf.DType]) -> str:
    """Return the name of the engine that serves a group's call between its hosts; on one host, "shared_memory"."""
    hosts = job.hosts
    if any(map(hosts.uses_nccl, dtypes)):
        return "nccl"
    if hosts.number_of(group.ranks) == 1:
        return "shared_memory"
    # With NCCL between hosts, all other dtypes take TensorFlow's ring.
    if hosts.engine == "nccl":
        return "tensorflow"
    return hosts.engine


def explained(job: Job, group: Group) -> str:
    """Return in words which engine reduces the gradients of a group, and why."""
    hosts = job.hosts
    name = engine_name(job, group, [tf.float32])
    wanted = environment.NPU_DEVICE_BACKEND.get()
    chosen = ""
    if wanted == name:
        chosen = f"NPU_DEVICE_BACKEND is {wanted}"
    if name == "shared_memory":
        return "shared memory: all ranks share that of one host"
    if name == "nccl":
        return f"TensorFlow's collectives with NCCL: {chosen or 'each rank has a GPU of its own'} ({UNVERIFIED})"
    # The library is known only on ranks that have started MPI.
    library = "MPI"
    if job.mpi_world:
        library = f"MPI ({job.mpi_world.library})"
    engine = {"mpi": library, "tcp": "TCP"}.get(name, "TensorFlow's ring over gRPC")
    why = "each rank has a host to itself"
    if isinstance(job.engines.engine_for_tensors(group, tf.float32), TwoLevelEngine):
        engine = f"shared memory within each host, and {engine} between them"
        why = "hosts have several ranks"
    elif environment.NPU_DEVICE_SHARED_MEMORY.get() == "off":
        why = "NPU_DEVICE_SHARED_MEMORY is off"
    elif any(hosts.problems):
        why = "ranks of one host can't share memory"
    if chosen:
        why = f"{chosen}, and {why}"
    if job.why_no_mpi:
        why += f". Not MPI: {job.why_no_mpi}"
    return f"{engine}: {why}"


def open_ports(job: Job) -> str:
    """Return in one line which ports are open to whom, and what can be done; "" if all ask for the job secret."""
    if not job.server_addresses:
        return ""
    addresses = shortened(job.server_addresses, _SHOWN_PORTS)
    return (
        f"TensorFlow's servers at {addresses} are open to everyone who can connect, without the job secret. "
        "NPU_DEVICE_BACKEND=tcp does without them; a firewall can limit them to the hosts of the job"
    )


def say(lines: list[str]) -> None:
    """Write lines to stderr, unless ``NPU_DEVICE_STATEMENT`` is ``off``."""
    if lines and environment.NPU_DEVICE_STATEMENT.get() == "on":
        print("\n".join(lines), file=sys.stderr, flush=True)


def say_open_ports(job: Job) -> None:
    """Let rank 0 say which ports of the job are open to whom, if there are any."""
    ports = open_ports(job)
    if ports and job.cluster.rank == 0:
        say([f"npu_device: {ports} (NPU_DEVICE_STATEMENT=off leaves this out)"])


def say_that_float16_may_be_slow(job: Job, group: Group) -> None:
    """Let rank 0 recommend other bits, once in a job, where Python converts what is sent between hosts."""
    engine = engine_name(job, group, [tf.float32])
    if engine not in ("tcp", "mpi") or job.has_advised_bits:
        return
    job.has_advised_bits = True
    if job.cluster.rank == 0:
        # These figures were measured through TCP between two namespaces, with 16 MB in four segments.
        say(
            [
                f'npu_device: compression="fp16" through {engine} takes longer than 32 bits on fast networks (with '
                'tcp: 0.5 times as long at 1 Gbit/s, 1.7 times at 10 Gbit/s): there, send 32 bits, or "bf16"'
            ]
        )
