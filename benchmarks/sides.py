"""The packages compared, their requirements, and the environment of their processes. Imports none of them.

The class named here does the work of a side's process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable

from benchmarks import mpiexecs
from npu_device._src.cluster.ports import ReservedPort
from npu_device._src.membership.rank_environment import rank_table
from npu_device._src.testing.hosts import address, can_be_made

SHARED_MEMORY = "shared_memory"
TENSORFLOW = "tensorflow"
MIRRORED = "mirrored"
GLOO = "gloo"
MPICH = "mpich"
TCP_OF_HOSTS, RING_OF_HOSTS, MPI_OF_HOSTS = "tcp_of_hosts", "tensorflow_of_hosts", "mpi_of_hosts"
GLOO_OF_HOSTS, MPICH_OF_HOSTS = "gloo_of_hosts", "mpich_of_hosts"
MIRRORED_OF_HOSTS = "mirrored_of_hosts"
GPU_HOST_MEMORY, GPU_NCCL = "gpu_host_memory", "gpu_nccl"
GPU_MIRRORED = "gpu_mirrored"
ONE_PROCESS, TWO_DEVICES, WATCHED = "one_process", "two_devices", "watched"
TUNED_COPIES = "tuned_copies"

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Side:
    """A package whose ranks are processes of their own.

    Attributes:
        module: the module of its class, under ``benchmarks``.
        name: the class; it is made with the rank and the number of ranks, and its methods make steps.
        environments: returns each rank's additional environment, given the number of ranks and a directory.
        needs: packages of the extra ``rivals``.
        started_by_mpiexec: rather than one by one; by MPICH's.
        on_hosts: each rank has one of ``npu_device._src.testing.hosts`` to itself, and a core.
        uses_gpus: its processes see the GPUs.
        is_alone: only rank 0's process is started.
    """

    module: str
    name: str
    environments: Callable[[int, Path], list[dict[str, str]]]
    needs: tuple[str, ...] = ()
    started_by_mpiexec: bool = False
    on_hosts: bool = False
    uses_gpus: bool = False
    is_alone: bool = False

    def make(self, rank: int, ranks: int) -> Any:
        """Join the other ranks."""
        return getattr(importlib.import_module(f"benchmarks.{self.module}"), self.name)(rank, ranks)

    def missing(self) -> list[str]:
        """Return the required packages that aren't installed."""
        missing = [name for name in self.needs if version(name) is None]
        missing += ["root, ip and tc"] if self.on_hosts and not can_be_made() else []
        return (
            [*missing, "mpich"]
            if self.started_by_mpiexec and mpiexecs.mpiexec("MPICH") is None
            else missing
        )


def version(package: str) -> str | None:
    """Return the version of a package, None when it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free_port() -> int:
    with contextlib.closing(ReservedPort()) as reserved:
        return reserved.number


def _npu(ranks: int, directory: Path, engine: str, **settings: str) -> list[dict[str, str]]:
    """Return the variables of ranks on this host: in shared memory, or through an engine."""
    table = directory / f"ranks_{engine}{len(settings)}.json"
    table.write_text(rank_table((0,), ranks, _HOST, _free_port()))
    common = {
        "RANK_TABLE_FILE": str(table.resolve()),
        "RANK_SIZE": str(ranks),
        "JOB_ID": "benchmarks",
        **settings,
    }
    if engine != SHARED_MEMORY:
        common |= {"NPU_DEVICE_BACKEND": engine, "NPU_DEVICE_SHARED_MEMORY": "off"}
    return [
        {**common, "RANK_ID": str(rank), "ASCEND_DEVICE_ID": str(rank)} for rank in range(ranks)
    ]


def _host_memory(ranks: int, directory: Path) -> list[dict[str, str]]:
    """Return what keeps NCCL from being used: the name of another engine."""
    return [
        {**each, "NPU_DEVICE_BACKEND": "tensorflow"}
        for each in _npu(ranks, directory, SHARED_MEMORY)
    ]


def _mirrored(ranks: int, _: Path) -> list[dict[str, str]]:
    return _workers([_HOST] * ranks)


def _mirrored_on_hosts(ranks: int, _: Path) -> list[dict[str, str]]:
    return _workers([address(rank) for rank in range(ranks)])


def _workers(addresses: Sequence[str]) -> list[dict[str, str]]:
    """Return the variables of workers of ``tf.distribute`` at these addresses."""
    workers = [f"{name}:{_free_port()}" for name in addresses]
    tasks = [{"type": "worker", "index": rank} for rank in range(len(workers))]
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})} for task in tasks
    ]


def _mirrored_on_gpus(ranks: int, directory: Path) -> list[dict[str, str]]:
    """Give each worker a GPU of its own: the strategy takes all that it sees."""
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))).split(
        ","
    )
    return [
        {**environment, "CUDA_VISIBLE_DEVICES": visible[rank % len(visible)]}
        for rank, environment in enumerate(_mirrored(ranks, directory))
    ]


def _gloo(ranks: int, _: Path) -> list[dict[str, str]]:
    port = str(_free_port())
    return [{"MASTER_ADDR": _HOST, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}] * ranks


def _npu_on_hosts(ranks: int, directory: Path, engine: str) -> list[dict[str, str]]:
    """Return the variables of ranks whose table names the hosts: they all have this machine's name, and could share
    its memory.
    """
    table = directory / f"hosts_{engine}.json"
    table.write_text(rank_table(range(ranks), 1, address(0), _free_port()))
    common = {
        "RANK_TABLE_FILE": str(table.resolve()),
        "RANK_SIZE": str(ranks),
        "NPU_DEVICE_BACKEND": engine,
    }
    common |= {"JOB_ID": "benchmarks", "NPU_DEVICE_SECRET": secrets.token_hex(32)}
    return [
        {**common, "RANK_ID": str(rank), "ASCEND_DEVICE_ID": "0", "HCCL_IF_IP": address(rank)}
        for rank in range(ranks)
    ]


def _gloo_on_hosts(ranks: int, _: Path) -> list[dict[str, str]]:
    return [
        {"MASTER_ADDR": address(0), "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
    ] * ranks


def _mpi_on_hosts(ranks: int, _: Path, **settings: str) -> list[dict[str, str]]:
    """Return what keeps MPICH from using the memory that these hosts share after all."""
    common = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "HCCL_SOCKET_IFNAME": "eth0"}
    return [{**common, **settings}] * ranks


def _nothing(ranks: int, _: Path) -> list[dict[str, str]]:
    return [{}] * ranks


SIDES = {
    SHARED_MEMORY: Side("npu_side", "NpuSide", partial(_npu, engine="shared_memory")),
    TENSORFLOW: Side("npu_side", "NpuSide", partial(_npu, engine="tensorflow")),
    MIRRORED: Side("mirrored_side", "MirroredSide", _mirrored),
    MIRRORED_OF_HOSTS: Side("mirrored_side", "MirroredSide", _mirrored_on_hosts, on_hosts=True),
    GLOO: Side("gloo_side", "GlooSide", _gloo, needs=("torch",)),
    MPICH: Side("mpich_side", "MpichSide", _nothing, needs=("mpi4py",), started_by_mpiexec=True),
    TCP_OF_HOSTS: Side("npu_side", "NpuSide", partial(_npu_on_hosts, engine="tcp"), on_hosts=True),
    RING_OF_HOSTS: Side(
        "npu_side", "NpuSide", partial(_npu_on_hosts, engine="tensorflow"), on_hosts=True
    ),
    MPI_OF_HOSTS: Side(
        "npu_side",
        "NpuSide",
        partial(_mpi_on_hosts, NPU_DEVICE_BACKEND="mpi"),
        needs=("mpi4py",),
        started_by_mpiexec=True,
        on_hosts=True,
    ),
    GLOO_OF_HOSTS: Side("gloo_side", "GlooSide", _gloo_on_hosts, needs=("torch",), on_hosts=True),
    MPICH_OF_HOSTS: Side(
        "mpich_side",
        "MpichSide",
        _mpi_on_hosts,
        needs=("mpi4py",),
        started_by_mpiexec=True,
        on_hosts=True,
    ),
    GPU_HOST_MEMORY: Side("npu_side", "NpuSide", _host_memory, uses_gpus=True),
    GPU_NCCL: Side("npu_side", "NpuSide", partial(_npu, engine="nccl"), uses_gpus=True),
    GPU_MIRRORED: Side("mirrored_side", "MirroredSide", _mirrored_on_gpus, uses_gpus=True),
    ONE_PROCESS: Side("npu_side", "NpuSide", _nothing, is_alone=True),
    TWO_DEVICES: Side("mirrored_side", "DevicesSide", _nothing, uses_gpus=True, is_alone=True),
    TUNED_COPIES: Side(
        "npu_side",
        "NpuSide",
        partial(
            _npu,
            engine=SHARED_MEMORY,
            # From this size on, the C library writes past the cache.
            GLIBC_TUNABLES="glibc.cpu.x86_non_temporal_threshold=262144",
        ),
    ),
    WATCHED: Side(
        "npu_side", "NpuSide", partial(_npu, engine=SHARED_MEMORY, NPU_DEVICE_AUDIT="auto")
    ),
}
