"""Fixtures: pools of workers, one for each world size and Keras, started when first needed and reused by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import forked
import pytest
from pool import Pool

# In the background of a shell, or under nohup, a test run begins with these ignored, and so would the processes that it
# starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

WORLD_SIZES = (1, 2, 3)
KERAS = ("2", "3")

CHOSEN_BACKEND = os.environ.get("NPU_DEVICE_BACKEND")  # for all tests
BACKENDS = (CHOSEN_BACKEND,) if CHOSEN_BACKEND else ("shared_memory", "tensorflow")

_pools: dict[tuple[int, str, str | None], Pool] = {}


def _pool(size: int, keras: str, backend: str | None = None) -> Pool:
    backend = backend if size > 1 else None
    pool = _pools.get((size, keras, backend))
    if pool is None or not pool.alive:
        extra = {"NPU_DEVICE_BACKEND": backend} if backend else {}
        pool = _pools[size, keras, backend] = Pool(size, keras, **extra)
    return pool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("both_backends") and "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str | None:
    """How data travels, in tests that are marked ``both_backends``; else the ranks' own choice."""
    return getattr(request, "param", None)


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """Number of ranks."""
    return int(request.param)


@pytest.fixture(scope="session", params=KERAS, ids=lambda keras: f"keras{keras}")
def keras(request: pytest.FixtureRequest) -> str:
    """Which Keras tf.keras is."""
    return str(request.param)


@pytest.fixture
def ranks(size: int, backend: str | None) -> Pool:
    """1, 2 and 3 ranks, under Keras 3: for what has nothing to do with Keras."""
    return _pool(size, "3", backend)


@pytest.fixture(params=WORLD_SIZES[1:], ids=lambda size: f"{size}ranks")
def several_ranks(request: pytest.FixtureRequest, backend: str | None) -> Pool:
    """2 and 3 ranks, under Keras 3: for what has nothing to do on a single device."""
    return _pool(request.param, "3", backend)


@pytest.fixture
def two_ranks(backend: str | None) -> Pool:
    """2 ranks, under Keras 3: for what is too large for more."""
    return _pool(2, "3", backend)


@pytest.fixture
def keras_ranks(size: int, keras: str) -> Pool:
    """1, 2 and 3 ranks under either Keras."""
    return _pool(size, keras)


@pytest.fixture
def keras_single(keras: str) -> Pool:
    """One process without a cluster, under either Keras."""
    return _pool(1, keras)


@pytest.fixture
def keras_two_ranks(keras: str) -> Pool:
    """2 ranks under either Keras."""
    return _pool(2, keras)


@pytest.fixture
def single() -> Pool:
    """One process without a cluster, under Keras 3."""
    return _pool(1, "3")


@pytest.fixture(scope="session", autouse=True)
def close_processes() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.hang_up()
    for pool in _pools.values():
        pool.close()
    _pools.clear()
    forked.close()
