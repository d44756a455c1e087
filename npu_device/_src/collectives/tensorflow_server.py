"""TensorFlow's server and collective runtime on one rank, started only if a group needs them.

The server listens on all of the host's addresses and authenticates no client (docs/security.md). It can only be started
before TensorFlow has made its devices. TensorFlow's coordination service isn't used: the package's hub does its work.
"""

from __future__ import annotations

import contextlib
import ctypes

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.ports import ReservedPort, join_address
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.job import Job

_JOB = "worker"
_LEADER = f"/job:{_JOB}/replica:0/task:0"
_M_TRIM_THRESHOLD = -1  # number of the parameter in malloc.h
_M_MMAP_THRESHOLD = -3
_MOST = 2**31 - 1  # mallopt takes an int


def start(job: Job) -> None:
    """Start this rank's server and wait until all ranks have started theirs. Every rank calls this."""
    cluster = job.cluster
    timeout = environment.HCCL_CONNECT_TIMEOUT.get()
    try:
        reserved = ReservedPort(environment.NPU_DEVICE_PORT_RANGE.get())
    except OSError as error:
        raise ClusterError(
            f"{cluster.name} finds no free port for TensorFlow's server: {error.strerror}.\n"
            "What to do: let NPU_DEVICE_PORT_RANGE have two ports for each rank of a host, plus one."
        ) from error
    # The port stays reserved until all ranks know it, so that no other process takes it meanwhile.
    with contextlib.closing(reserved):
        ports = job.control.gather("server/ports", reserved.number, timeout)
        reserved.leave_to_server()
        addresses = [join_address(host, port) for host, port in zip(cluster.addresses, ports)]
        _initialize(job, addresses, reserved.number)
    context = compat.eager_context()
    job.server_addresses = tuple(addresses)
    job.task = f"/job:{_JOB}/replica:0/task:{cluster.rank}"
    # A rank may have its result while its server still sends data of the last collective to others, and rank 0 leads
    # all of them: so no rank ends before the others.
    job.serves_others = True
    # Nobody may connect to a server that isn't there yet.
    job.control.gather("server/up", None, timeout)
    job.health.on_stop(lambda text: context.abort_collective_ops(tf.errors.UNAVAILABLE, text))


def _initialize(job: Job, addresses: list[str], port: int) -> None:
    cluster = job.cluster
    context = compat.eager_context()
    context.configure_collective_ops(
        collective_leader=_LEADER,
        use_nccl_communication=job.hosts.engine == "nccl",
        # A rank never places operations on another rank's devices.
        device_filters=(f"/job:{_JOB}/task:{cluster.rank}",),
    )
    config = context.config
    # By default TensorFlow cuts received data into strings of 4096 bytes, which costs processor time
    # (docs/notes.md). Its own DTensor sets the same.
    config.experimental.recv_buf_max_chunk = -1
    # What else would end the job when a rank is stopped for a while (TensorFlow 2.20, docs/notes.md): gRPC closes a
    # connection on which a ping isn't acknowledged for 60 s. The receiver then asks again, and the sender still has
    # what it sent. With many more attempts than these, TensorFlow couldn't abort a transfer from a rank that is gone.
    environment.GRPC_MAX_RETRIES.pass_on()
    config.rpc_options.cache_rpc_response = True
    # And gRPC's client gives up a new connection that the other side doesn't answer for 20 s. The message by which the
    # sender learns that it can forget a transfer must not fail: TensorFlow would repeat it with memory that it has
    # freed, and crash. So gRPC keeps it. After some small transfers gRPC's estimate of how much it should accept at
    # once is too low for a slow link (docs/notes.md).
    environment.TF_GRPC_DEFAULT_OPTIONS.pass_on()
    environment.reach_without_proxy(cluster.addresses)
    _keep_freed_memory()
    context.enable_collective_ops(
        compat.server_def({_JOB: addresses}, _JOB, cluster.rank, port, config)
    )
    try:
        context.ensure_initialized()
    except tf.errors.OpError as error:
        raise ClusterError(
            f"{cluster.name} could not start TensorFlow's server at {addresses[cluster.rank]}: {error.message}\n"
            "Likely cause: another program took the port in the meantime.\n"
            "What to do: start the job again."
        ) from error


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory: it would return TensorFlow's buffers of some MB to the system, and take fresh pages
    for each transfer, which costs more than to copy them (docs/notes.md).
    """
    # Only glibc has this function.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, min(_MOST, environment.MALLOC_MMAP_THRESHOLD_.get()))
        mallopt(_M_TRIM_THRESHOLD, min(_MOST, environment.MALLOC_TRIM_THRESHOLD_.get()))
