"""Fixtures of the GPU tests: ranks that share one GPU, and ranks that have one each.

On CPUs, the first share memory, and the second use TensorFlow's backend, which NCCL is part of.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from pool import Pool
from ranks import all_through

HOST_MEMORY, NCCL = "host memory", "NCCL"
_HERE = Path(__file__).parent
_COUNT = 'import tensorflow as tf; print("GPUs:", len(tf.config.list_physical_devices("GPU")))'


@cache
def _gpus() -> int:
    """Return how many GPUs TensorFlow sees."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _COUNT]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return int(found.stdout.rsplit("GPUs:", 1)[1])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in item.path.parents]
    device = config.getoption("--device")
    if not ours or device == "cpu":
        return
    if device is None:
        reason = "make test-gpu runs these"
    else:
        reason = "" if _gpus() else "TensorFlow sees no GPU; --device cpu runs these tests on CPUs"
    for item in ours if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Way:
    """The way of floating-point tensors from rank to rank.

    Attributes:
        name: "host memory" or "NCCL".
        on_gpu: the ranks have GPUs.
        environment: what makes the ranks use it.
        pool: returns the ranks of a size and a Keras.
    """

    name: str
    on_gpu: bool
    environment: dict[str, str]
    pool: Callable[[int, str], Pool]


@pytest.fixture(params=(HOST_MEMORY, NCCL))
def way(request: pytest.FixtureRequest, pytestconfig: pytest.Config, pool_with: Callable[..., Pool]) -> Way:
    """Both ways; NCCL needs two GPUs."""
    on_gpu = pytestconfig.getoption("--device") == "gpu"
    shares = request.param == HOST_MEMORY
    environment = {} if shares else all_through("nccl" if on_gpu else "tensorflow")
    if on_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_gpus())))
        if not shares and _gpus() < 2:
            pytest.skip("NCCL needs a GPU for each rank, and there is one")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0] if shares else visible
    return Way(request.param, on_gpu, environment, partial(pool_with, **environment))


@pytest.fixture
def on_cpu(pool_with: Callable[..., Pool]) -> Callable[[str], Pool]:
    """Return a function that returns one process without GPUs, for a Keras: what the results are compared with."""
    return lambda keras: pool_with(1, keras)
