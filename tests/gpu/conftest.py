"""Fixtures of the GPU tests: ranks that share one GPU, and ranks that have one each.

On CPUs, the first share memory, and the second use the engine of TensorFlow, with which NCCL comes. With one GPU, all
share it, the second as ranks of different hosts by rank table and ``NCCL_HOSTID``, or NCCL would refuse them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pool import Pool
from ranks import all_through, free_port

HOST_MEMORY, NCCL = "host memory", "NCCL"
_HERE = Path(__file__).parent
_COUNT = 'import tensorflow as tf; print("GPUs:", len(tf.config.list_physical_devices("GPU")))'


@cache
def _gpus() -> int:
    """Return how many GPUs TensorFlow sees."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _COUNT]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(found.stdout.rsplit("GPUs:", 1)[1])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in item.path.parents]
    device = config.getoption("--device")
    if device is None:
        reason = "make test-gpu runs these"
    elif ours and device == "gpu" and not _gpus():
        reason = "TensorFlow sees no GPU; --device cpu runs these tests on CPUs"
    else:
        return
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Way:
    """The way of floating-point tensors from rank to rank."""

    name: str
    on_gpu: bool
    variables: dict[str, str]  # make the ranks use it
    apart: bool  # two ranks share a GPU as if they were on different hosts
    pool_with: Callable[..., Pool]

    def environment(self, directory: Path) -> dict[str, str]:
        """Return the variables of a job of two ranks, whose rank table is in the directory if it needs one."""
        if not self.apart:
            return self.variables
        devices = [
            {"device_id": "0", "device_ip": f"10.0.0.{rank + 1}", "rank_id": str(rank)}
            for rank in range(2)
        ]
        servers = [
            {"server_id": f"127.0.0.{rank + 1}", "device": [device]}
            for rank, device in enumerate(devices)
        ]
        devices[0]["host_port"] = str(free_port())
        content = {
            "version": "1.0",
            "status": "completed",
            "server_count": "2",
            "server_list": servers,
        }
        table = directory / "hosts.json"
        table.write_text(json.dumps(content))
        return {**self.variables, "RANK_TABLE_FILE": str(table)}

    def pool(self, size: int, keras: str) -> Pool:
        """Return the ranks of a size and a Keras."""
        return self.pool_with(size, keras, **self.environment(_directory(keras)))


@cache
def _directory(keras: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"npu_gpu_keras{keras}_"))


@pytest.fixture(params=(HOST_MEMORY, NCCL))
def way(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, pool_with: Callable[..., Pool]
) -> Way:
    """Both ways."""
    on_gpu = pytestconfig.getoption("--device") == "gpu"
    shares = request.param == HOST_MEMORY
    environment = {} if shares else all_through("nccl" if on_gpu else "tensorflow")
    apart = on_gpu and not shares and _gpus() < 2
    if on_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_gpus())))
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0] if shares else visible
    if apart:
        environment |= {
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_HOSTID": "own",
        }
    return Way(request.param, on_gpu, environment, apart, pool_with)


@pytest.fixture
def on_cpu(pool_with: Callable[..., Pool]) -> Callable[[str], Pool]:
    """Return a function that returns one process without GPUs, for a Keras: what the results are compared with."""
    return lambda keras: pool_with(1, keras)
