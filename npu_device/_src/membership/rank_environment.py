"""Rank tables as they are written, and the environment of ranks on this machine: with a port that the system chose."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.ports import ReservedPort
from npu_device._src.membership.parent_rank import OF_A_RANK

_KEPT = (
    "NPU_DEVICE_BACKEND",
    "NPU_DEVICE_SHARED_MEMORY",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
_MOST_HELD = 64

_held_ports = deque[ReservedPort]()


def free_port() -> int:
    """Return a port for a server that is about to start. This process holds the latest ports, so that meanwhile the
    system gives them to nobody else: a server has to bind its port explicitly, with SO_REUSEADDR.
    """
    release_ports(_MOST_HELD)
    _held_ports.append(ReservedPort())
    return _held_ports[-1].number


def release_ports(kept: int = 0) -> None:
    """Release the ports that ``free_port`` holds, but for the latest ones."""
    while len(_held_ports) > kept:
        _held_ports.popleft().close()


def rank_table(
    nodes: Sequence[int], nproc_per_node: int, master_addr: str, master_port: int
) -> str:
    """Return the rank table as JSON, in Ascend's version 1.0 (HCCL user guide): the same bytes on every node."""
    servers: list[dict[str, Any]] = []
    for index, node in enumerate(nodes):
        ranks = range(index * nproc_per_node, (index + 1) * nproc_per_node)
        devices = [
            {"device_id": str(device_id), "rank_id": str(rank)}
            for device_id, rank in enumerate(ranks)
        ]
        servers.append({"server_id": f"node{node}", "device": devices})
    # Only the first server needs an address: there the ranks meet.
    servers[0]["host_ip"] = master_addr
    servers[0]["device"][0]["host_port"] = str(master_port)
    table = {
        "version": "1.0",
        "status": "completed",
        "server_count": str(len(nodes)),
        "server_list": servers,
    }
    return json.dumps(table, indent=2) + "\n"


def table_environment(directory: Path, size: int, rank: int) -> dict[str, str]:
    """Return the variables of one rank; ranks of a job give the same directory, in which the table is written once."""
    table = directory / "ranks.json"
    if not table.exists():
        table.write_text(rank_table([0], size, "127.0.0.1", free_port()))
    variables = rank_variables(str(table), rank, rank, size, "tests")
    variables["HCCL_CONNECT_TIMEOUT"] = "60"
    if environment.NPU_DEVICE_HOROVOD.is_set():
        variables |= horovod_environment(rank, size, size)
    return variables


def rank_variables(
    table: str, rank: int, local_rank: int, size: int, job_id: str
) -> dict[str, str]:
    """Return what Ascend's launch scripts tell a rank, whose job has a rank table."""
    return {
        "RANK_TABLE_FILE": table,
        "RANK_ID": str(rank),
        "RANK_SIZE": str(size),
        "ASCEND_DEVICE_ID": str(local_rank),
        "DEVICE_ID": str(local_rank),
        "JOB_ID": job_id,
    }


def horovod_environment(rank: int, size: int, local_size: int) -> dict[str, str]:
    """Return what Horovod's launcher tells a rank; all hosts have ``local_size`` ranks."""
    host = rank // local_size
    numbers = (rank, size, rank % local_size, local_size, host, size // local_size)
    return dict(zip(environment.HOROVOD_OF_A_RANK, map(str, numbers)))


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without what describes a job, and without GPUs. What chooses the engine
    stays: with it a whole suite can be run on one.
    """
    # Variables of an outer job would make these processes its ranks.
    ours = {variable.name for variable in environment.ALL}.difference(_KEPT)
    inherited = {name: text for name, text in os.environ.items() if name not in ours}
    return {**inherited, "CUDA_VISIBLE_DEVICES": "-1"}


def environment_without_job() -> dict[str, str]:
    """Return the environment of this process without what describes a rank; options and GPUs stay."""
    rank = {variable.name for variable in OF_A_RANK}.union(environment.HOROVOD_OF_A_RANK)
    rank.add(environment.NPU_DEVICE_RANK_PROCESS.name)
    return {name: text for name, text in os.environ.items() if name not in rank}
