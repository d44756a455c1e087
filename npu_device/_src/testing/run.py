"""``run``: calls a function on real ranks, which are started once and used again. Imports no TensorFlow."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_device._src.pools import forked
from npu_device._src.pools.answers import RankError
from npu_device._src.pools.pool import Pool, packed
from npu_device._src.testing.faults import Armed, Fault

_PoolKey = tuple
_LIVE_RANKS = 6  # ranks that are alive at once, each of which takes some 500 MB

_pools: dict[_PoolKey, Pool] = {}  # the last used one is the last


def run(
    function: Callable,
    *arguments: Any,
    ranks: int = 2,
    keras: int | None = None,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    faults: Sequence[Fault] = (),
    restarts: int = 0,
    limit: float = 300.0,
) -> list:
    """Call ``function(*arguments)`` on a number of real ranks; return what each returned, in order of rank.

    The ranks are processes of one job on this machine, on its CPU. They are started when first needed, and used again
    by later calls with the same ``ranks``, ``keras`` and ``environment``. Keras's state, the seeds, the environment and
    the working directory are at each call as at the start.

    Args:
        function: at the top level of a module that the ranks can import, as this process can.
        *arguments: sent to the ranks, as pickle does.
        ranks: how many; 1 is a process, too, without a job.
        keras: 2 or 3; by default as ``TF_USE_LEGACY_KERAS`` says.
        environment: variables that the ranks have besides those of this process.
        fresh: start new processes for this call, and end them after it.
        faults: what happens to ranks at a step, see ``faults``; the processes are new then.
        restarts: how often all ranks are started again when the call fails, as by ``npurun --max-restarts``.
        limit: seconds that the call may take, each time.

    Returns:
        A list with what the function returned on each rank, in order of rank.

    Raises:
        AssertionError: a fault did not happen.
        RankError: the function raised on a rank, or did not return in time. The error that came first is the first in
            the text, with its traceback; the output of each rank follows.
        TypeError: function or arguments can't be sent.
        MemoryError: there is too little memory for so many ranks.
    """
    key = pool_key(ranks, keras, environment or {})
    # Packed here so that an error comes before the ranks start.
    packed(function, arguments)
    if not (fresh or faults or restarts):
        return pool_of(key).run(function, *arguments, timeout=limit)
    with tempfile.TemporaryDirectory(prefix="npu_faults_") as directory:
        armed = Armed(function, faults, Path(directory))
        try:
            returned = _run_with_restarts(key, armed, arguments, restarts, limit)
        except RankError:
            # A rank that failed by a fault is what was asked for; one that never happened is the better
            # error.
            armed.require_all()
            raise
        armed.require_all()
        return returned


def _run_with_restarts(
    key: _PoolKey, armed: Armed, arguments: tuple, restarts: int, limit: float
) -> list:
    """Call a function on new ranks, again if it fails on one."""
    size, keras, environment, *_ = key
    attempt = 0
    while True:
        variables = {**dict(environment), "NPU_DEVICE_RESTART_COUNT": str(attempt)}
        pool = Pool(size, keras, **variables)
        try:
            return pool.run(armed, *arguments, timeout=limit)
        except RankError:
            # Started again as npurun does, with what the ranks have saved.
            if attempt >= restarts:
                raise
        finally:
            pool.close()
        attempt += 1


def pool_key(ranks: int, keras: object, environment: Mapping[str, str]) -> _PoolKey:
    """Return what tells pools apart; ValueError if the number of ranks or the Keras is impossible."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected a whole number from 1")
    if str(keras) not in ("2", "3", "None"):
        raise ValueError(f"keras={keras!r}: expected 2, 3, or None")
    keras_version = None
    if keras is not None:
        keras_version = str(keras)
    return ranks, keras_version, tuple(sorted(environment.items()))


def pool_of(key: _PoolKey, pool_class: type[Pool] = Pool) -> Any:
    """Return ranks that wait for a call; those that have not been used for longest end when there are too many."""
    # The pool is taken out and put back at the end, so that pools are in the order of their last use.
    pool = _pools.pop(key, None)
    if pool is None or not pool.alive:
        if pool is not None:
            pool.close()
        size, keras, environment, *_ = key
        while _pools and sum(pool.size for pool in _pools.values()) + size > _LIVE_RANKS:
            _pools.pop(next(iter(_pools))).close()
        pool = pool_class(size, keras, **dict(environment))
        # Called before the pool's folder is removed, because it is registered after that.
        atexit.unregister(close)
        atexit.register(close)
    _pools[key] = pool
    return pool


def pools() -> list[Pool]:
    return list(_pools.values())


def close_pools(pool_class: type[Pool] = Pool) -> None:
    ending = {key: pool for key, pool in _pools.items() if isinstance(pool, pool_class)}
    for pool in ending.values():
        pool.hang_up()
    for key, pool in ending.items():
        pool.close()
        del _pools[key]


def close() -> None:
    close_pools()
    forked.close()
