"""The environment of a rank: rank tables on this machine, with a port that the system chose."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from npu_device._src import environment

LEAN = str(Path(__file__).parent / "lean")
"""Modules that hide installed packages of the same names, which TensorFlow and Keras import only because they are
there: pandas, scikit-learn, matplotlib and others. From start to exit, a process with TensorFlow takes 2.3 s of CPU
time instead of 5.3 s.
"""


DEAD_PROXY = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
"""A proxy at which nobody answers."""


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def table_environment(directory: Path, size: int, rank: int) -> dict[str, str]:
    """The variables of one rank; all ranks of a job give the same directory, in which the table is written once."""
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


def all_through(backend: str | None) -> dict[str, str]:
    """Return what lets all tensors of ranks on one host go through an engine; nothing for shared memory."""
    if backend in (None, "auto", "shared_memory"):
        return {}
    return {"NPU_DEVICE_BACKEND": str(backend), "NPU_DEVICE_SHARED_MEMORY": "off"}


def clean_environment() -> dict[str, str]:
    """This process's environment without anything that describes a cluster. What chooses the engine stays: with it the
    whole suite can be run on one. Python finds ``LEAN``. GPUs are hidden;
    ``tests/gpu`` shows them to its ranks.
    """
    kept = ("NPU_DEVICE_BACKEND", "NPU_DEVICE_SHARED_MEMORY", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    ours = {variable.name for variable in environment.ALL}.difference(kept)
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    path = os.pathsep.join(filter(None, (LEAN, os.environ.get("PYTHONPATH"))))
    return {**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"}
