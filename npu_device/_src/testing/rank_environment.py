"""The environment of ranks on this machine: a rank table, with a port that the system chose. Imports no TensorFlow."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from npu_device._src import environment

_KEPT = ("NPU_DEVICE_BACKEND", "NPU_DEVICE_SHARED_MEMORY", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def free_port() -> int:
    """Return a TCP port that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def table_environment(directory: Path, size: int, rank: int) -> dict[str, str]:
    """Return the variables of one rank; ranks of a job give the same directory, in which the table is written once."""
    table = directory / "ranks.json"
    if not table.exists():
        devices = [{"device_id": str(i), "device_ip": f"10.0.0.{i + 1}", "rank_id": str(i)} for i in range(size)]
        devices[0]["host_port"] = str(free_port())
        servers = [{"server_id": "here", "device": devices}]
        table.write_text(
            json.dumps({"version": "1.0", "status": "completed", "server_count": "1", "server_list": servers})
        )
    return {
        "RANK_TABLE_FILE": str(table),
        "RANK_ID": str(rank),
        "RANK_SIZE": str(size),
        "ASCEND_DEVICE_ID": str(rank),
        "JOB_ID": "tests",
        "HCCL_CONNECT_TIMEOUT": "60",
    }


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what describes a job, and without GPUs. What chooses the engine
    stays: with it a whole suite can be run on one.
    """
    ours = {variable.name for variable in environment.ALL}.difference(_KEPT)
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return {**inherited, "CUDA_VISIBLE_DEVICES": "-1"}
