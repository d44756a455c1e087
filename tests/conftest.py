"""Fixtures: pools of workers, one for each world size and Keras, started when first needed and reused by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from pool import Pool

# In the background of a shell, or under nohup, a test run begins with these ignored, and so would the processes that it
# starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

WORLD_SIZES = (1, 2, 3)
KERAS = ("2", "3")

_pools: dict[tuple[int, str], Pool] = {}


def _pool(size: int, keras: str) -> Pool:
    pool = _pools.get((size, keras))
    if pool is None or not pool.alive:
        pool = _pools[size, keras] = Pool(size, keras)
    return pool


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """Number of ranks."""
    return int(request.param)


@pytest.fixture(scope="session", params=KERAS, ids=lambda keras: f"keras{keras}")
def keras(request: pytest.FixtureRequest) -> str:
    """Which Keras tf.keras is."""
    return str(request.param)


@pytest.fixture
def ranks(size: int) -> Pool:
    """1, 2 and 3 ranks, under Keras 3: for what has nothing to do with Keras."""
    return _pool(size, "3")


@pytest.fixture(params=WORLD_SIZES[1:], ids=lambda size: f"{size}ranks")
def several_ranks(request: pytest.FixtureRequest) -> Pool:
    """2 and 3 ranks, under Keras 3: for what has nothing to do on a single device."""
    return _pool(request.param, "3")


@pytest.fixture
def two_ranks() -> Pool:
    """2 ranks, under Keras 3: for what is too large for more."""
    return _pool(2, "3")


@pytest.fixture
def keras_ranks(size: int, keras: str) -> Pool:
    """1, 2 and 3 ranks under either Keras."""
    return _pool(size, keras)


@pytest.fixture
def single() -> Pool:
    """One process without a cluster, under Keras 3."""
    return _pool(1, "3")


@pytest.fixture(scope="session", autouse=True)
def close_pools() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.close()
    _pools.clear()
