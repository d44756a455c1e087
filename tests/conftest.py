"""Fixtures: pools of workers, one for each world size and Keras, started when first needed and reused by all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from typing import Any, Callable

import allowed_warnings
import pytest
import versions
from mpi_ranks import MPIS, OPEN_MPI, MpiPool
from pool import Pool
from ranks import LEAN, ROOT, all_through
from rendezvous_ranks import start  # noqa: F401 - a fixture

from npu_device._src.membership import rank_environment
from npu_device._src.pools import forked
from npu_device._src.pools.pool import Pool as PlainPool
from npu_device._src.testing import leaks, run

with contextlib.suppress(ImportError):  # tests that need Hypothesis are skipped without it
    import fuzz_profiles  # noqa: F401

# Tests and package are compiled once for all processes, even where the environment forbids it: hundreds of ranks would
# compile the package each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Processes that tests start would import the installed package, which may be that of another tree.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

# In the background of a shell, or under nohup, a test run begins with these ignored, and so would the processes that it
# starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

WORLD_SIZES = (1, 2, 3)
KERAS = ("2", "3")

CHOSEN_ENGINE = os.environ.get("NPU_DEVICE_BACKEND")  # for all tests
if CHOSEN_ENGINE:
    os.environ.setdefault("NPU_DEVICE_SHARED_MEMORY", "off")
ENGINES = (CHOSEN_ENGINE,) if CHOSEN_ENGINE else ("shared_memory", "tensorflow")
MORE_ENGINES = {"tcp": 3, "mpi": 3, "Open MPI": 2}
"""Engines that move data between two ranks at a time, and on how many ranks they are tested. "mpi" is MPICH's."""

_MANY_FILES = 50  # of the whole suite, whose quick run is to take three minutes
_WORKER_BYTES = 6 << 30  # with its ranks, and the processes that fork them


def _kind(size: int, keras: str, engine: str | None = None) -> Any:
    if engine == "Open MPI":
        return run.pool_key(size, keras, {**all_through("mpi"), **OPEN_MPI})
    return run.pool_key(size, keras, all_through(None if size == 1 else engine))


def _pool(size: int, keras: str, engine: str | None = None) -> Any:
    return _pool_of(_kind(size, keras, engine), MpiPool if engine in MPIS else Pool)


def _pool_of(kind: Any, pool_class: type[Pool] = Pool) -> Any:
    pool: Pool = run.pool_of(kind, pool_class)
    if pool.is_worn:
        pool.close()
        pool = run.pool_of(kind, pool_class)
    return pool


_TURNS = ((2, 1), (3, 0), (2, 1), (1, 0), (3, 1), (2, 0))
"""What tests take turns with: a number of ranks, and the place of a Keras in ``KERAS``, and of an engine in
``ENGINES``. Any two in a row have both Kerases and both engines.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    quick = "each test once, of the whole suite every other one, with 2 ranks, Keras 3 and one engine; no slow tests"
    parser.addoption("--quick", action="store_true", help=quick)
    full = "every number of ranks with each Keras and each engine, and all tests"
    parser.addoption("--full", action="store_true", help=full)
    device = "run tests/gpu on GPUs, or on CPUs to check the tests themselves"
    parser.addoption("--device", choices=("gpu", "cpu"), help=device)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes run tests side by side with ``-n auto``: one a core, and one for the tests that mostly
    wait (the group "waiting"), as far as the memory reaches.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // _WORKER_BYTES))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _exists(item)]
    if not config.getoption("--full"):
        chosen = [item for item in chosen if item.get_closest_marker("full") is None]
        is_quick = config.getoption("--quick")
        if is_quick:
            chosen = [item for item in chosen if item.get_closest_marker("slow") is None]
        kept = set()
        if not is_quick:
            kept = {
                item
                for item in chosen
                if _is_on_another_engine(item) or item.get_closest_marker("every_combination")
            }
        for variants in _variants([item for item in chosen if item not in kept]):
            kept.update(_in_turns(variants, is_quick))
        chosen = [item for item in chosen if item in kept]
        if is_quick and len({item.path for item in chosen}) > _MANY_FILES:
            chosen = chosen[::2]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    for item in chosen:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    # Those of the pools first, which come in large groups, and the longest of the others next, so that no worker is
    # left with much in the end.
    items[:] = sorted(
        chosen, key=lambda item: (_group(item) or "~", item.get_closest_marker("slow") is None)
    )


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _is_on_another_engine(item: pytest.Item) -> bool:
    is_marked = item.get_closest_marker("more_engines") is not None
    return is_marked and _parameters(item).get("engine") in MORE_ENGINES


_SIZE_NAMES = ("size", "several_ranks", "several_keras_ranks", "tensorflow_ranks")


def _combination(item: pytest.Item) -> tuple[int | None, Any, Any]:
    """Return the number of ranks, the Keras and the engine that a test is to run with, as far as there is a choice."""
    parameters = _parameters(item)
    size = next((parameters[name] for name in _SIZE_NAMES if name in parameters), None)
    return size, parameters.get("keras"), parameters.get("engine")


def _exists(item: pytest.Item) -> bool:
    """Return False for a single process on a second engine, which it doesn't use; for what isn't to run on one of
    ``MORE_ENGINES``; and for what is marked to exist in the other Keras only, or in one that this TensorFlow lacks.
    """
    size, keras, engine = _combination(item)
    if _is_on_another_engine(item):
        own = _parameters(item)
        variants = item.get_closest_marker("more_engines").kwargs
        is_chosen = all(own[name] in chosen for name, chosen in variants.items())
        return is_chosen and size in (None, MORE_ENGINES[engine])
    if size == 1 and engine not in (None, ENGINES[0]):
        return False
    marker = item.get_closest_marker("only_keras")
    return marker is None or (keras in marker.args and (keras != "3" or versions.HAS_KERAS_3))


def _variants(items: list[pytest.Item]) -> list[list[list[pytest.Item]]]:
    """Return for each test its variants, by its own parameters, and for each variant its combinations."""
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        own = str(
            [
                each
                for each in _parameters(item).items()
                if each[0] not in (*_SIZE_NAMES, "keras", "engine")
            ]
        )
        tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(own, []).append(item)
    return [list(variants.values()) for variants in tests.values()]


def _in_turns(variants: list[list[pytest.Item]], is_quick: bool) -> list[pytest.Item]:
    """Return which items of a test to run: each variant with the combination whose turn it is, and a single one twice
    if there are two Kerases or engines, or one process, unless it is marked ``once``. Each test begins elsewhere.
    """
    if is_quick:
        return [_nearest(variants[0], 2, "3", ENGINES[0])]
    ways = {(size == 1, keras, engine) for size, keras, engine in map(_combination, variants[0])}
    is_once = variants[0][0].get_closest_marker("once") is not None
    least = 1 if is_once else min(2, len(ways))
    first = zlib.crc32(variants[0][0].nodeid.partition("[")[0].encode())
    chosen = []
    for number in range(max(len(variants), least)):
        size, place = _TURNS[(first + number) % len(_TURNS)]
        variant = variants[number % len(variants)]
        chosen.append(_nearest(variant, size, KERAS[place], ENGINES[place % len(ENGINES)]))
    return chosen


def _nearest(items: list[pytest.Item], size: int, keras: str, engine: str) -> pytest.Item:
    """Return the first item that has this Keras and engine, and this number of ranks or the next one to it."""

    def distance(item: pytest.Item) -> tuple[bool, int]:
        its_size, its_keras, its_engine = _combination(item)
        return (its_keras or keras, its_engine or engine) != (keras, engine), abs(
            (its_size or size) - size
        )

    return min(items, key=distance)


_SIZES = {"single": 1, "keras_single": 1, "two_ranks": 2, "keras_two_ranks": 2, "open_mpi_ranks": 2}
_ENGINES = {"tensorflow_ranks": "tensorflow", "open_mpi_ranks": "Open MPI"}
_POOLS = (
    *_SIZES,
    "ranks",
    "several_ranks",
    "tensorflow_ranks",
    "keras_ranks",
    "several_keras_ranks",
)


def _group(item: pytest.Item) -> str | None:
    """Return which tests one worker of pytest-xdist runs together with this one: those of the same, largest pool."""
    parameters = _parameters(item)
    kinds = []
    for fixture in set(_POOLS).intersection(getattr(item, "fixturenames", ())):
        size = _SIZES.get(fixture) or parameters.get(fixture) or parameters["size"]
        keras = parameters["keras"] if "keras" in fixture else "3"
        engine = _ENGINES.get(fixture, parameters.get("engine"))
        size, keras, environment = _kind(size, keras, engine)
        kinds.append("-".join([str(size), keras, *dict(environment).values()]))
    return max(kinds, default=None)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(
        config, "workerinput"
    ):  # of pytest-xdist: most parts of the suite import TensorFlow here as well
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(LEAN)
            import tensorflow as tf

            tf.keras.Sequential  # noqa: B018 - loads Keras, too
    for text, category, _ in allowed_warnings.ALLOWED:
        config.addinivalue_line(
            "filterwarnings", f"ignore:{text}:{category.__module__}.{category.__qualname__}"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" not in metafunc.fixturenames:
        return
    engines: list[str | None] = [None]
    if metafunc.definition.get_closest_marker("both_engines"):
        engines = list(ENGINES)
    more = metafunc.definition.get_closest_marker("more_engines")
    if more is not None and not CHOSEN_ENGINE:
        engines += more.args
    if engines != [None]:
        names = [engine or "usual" for engine in engines]
        metafunc.parametrize("engine", engines, indirect=True, ids=names, scope="session")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> str | None:
    """The engine in tests that are marked ``both_engines`` or ``more_engines``; else the ranks' own choice."""
    return getattr(request, "param", None)


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """Number of ranks."""
    return int(request.param)


@pytest.fixture(scope="session", params=KERAS, ids=lambda keras: f"keras{keras}")
def keras(request: pytest.FixtureRequest) -> str:
    """The Keras that tf.keras is."""
    return str(request.param)


@pytest.fixture
def ranks(size: int, engine: str | None) -> Pool:
    """1, 2 and 3 ranks, under Keras 3: for what has nothing to do with Keras."""
    return _pool(size, "3", engine)


@pytest.fixture(params=WORLD_SIZES[1:], ids=lambda size: f"{size}ranks")
def several_ranks(request: pytest.FixtureRequest, engine: str | None) -> Pool:
    """2 and 3 ranks, under Keras 3: for what has nothing to do on a single device."""
    return _pool(request.param, "3", engine)


@pytest.fixture(params=WORLD_SIZES[1:], ids=lambda size: f"{size}ranks")
def tensorflow_ranks(request: pytest.FixtureRequest) -> Pool:
    """2 and 3 ranks on TensorFlow's engine, under Keras 3."""
    return _pool(request.param, "3", "tensorflow")


@pytest.fixture
def open_mpi_ranks() -> Pool:
    """2 ranks on Open MPI, under Keras 3."""
    return _pool(2, "3", "Open MPI")


@pytest.fixture
def two_ranks(engine: str | None) -> Pool:
    """2 ranks, under Keras 3: for what is too large for more."""
    return _pool(2, "3", engine)


@pytest.fixture
def pool_with() -> Callable[..., Pool]:
    """Return a function that returns the ranks of a size, a Keras, and variables of the environment."""
    return lambda size, keras, **environment: _pool_of(run.pool_key(size, keras, environment))


@pytest.fixture
def keras_ranks(size: int, keras: str) -> Pool:
    """1, 2 and 3 ranks under either Keras."""
    return _pool(size, keras)


@pytest.fixture(params=WORLD_SIZES[1:], ids=lambda size: f"{size}ranks")
def several_keras_ranks(request: pytest.FixtureRequest, keras: str) -> Pool:
    """2 and 3 ranks under either Keras: for what is compared with one process."""
    return _pool(request.param, keras)


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


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread, a process or a descriptor, in this process or among the ranks of its jobs."""
    before = leaks.held()
    yield
    rank_environment.release_ports()
    left = leaks.left_since(before, _kept_for_other_tests)
    of_pools = {process.pid for pool in run.pools() for process in pool.processes}
    left += [
        f"rank {pid} runs"
        for server in list(forked._servers.values())
        for pid, command in leaks.children_of(server.pid).items()
        if command and pid not in of_pools
    ]
    assert not left, "the test leaves\n" + "\n".join(left)


def _kept_for_other_tests() -> set[str]:
    """Return the descriptors and the children of the pools and of the processes that fork."""
    servers = list(forked._servers.values())
    pipes = {
        pipe.fileno()
        for server in servers
        for pipe in (server.stdin, server.stdout)
        if pipe is not None
    }
    of_pools = {process.pid for pool in run.pools() for process in pool.processes}
    descriptors = pipes.union(*map(_connections, run.pools()))
    processes = of_pools.union(server.pid for server in servers)
    return {
        *(f"descriptor {descriptor}" for descriptor in descriptors),
        *(f"process {pid}" for pid in processes),
    }


def _connections(pool: PlainPool) -> list[int]:
    return [connection.fileno() for connection in pool._connections if not connection.closed]


@pytest.fixture(scope="session", autouse=True)
def close_processes() -> Iterator[None]:
    yield
    run.close()
