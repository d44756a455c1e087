"""The rounds of the shared-memory engine on real rings, whose members are threads of this process."""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf

from npu_device._src.collectives.call import Terms
from npu_device._src.collectives.call_count import HostTransferCount
from npu_device._src.collectives.dtypes import FOLDS
from npu_device._src.collectives.engines.host import transfer_rounds
from npu_device._src.collectives.engines.host.buffers import ALIGNMENT, BufferPool
from npu_device._src.collectives.engines.host.channel import Stream
from npu_device._src.collectives.engines.host.memory_ring import Layout, MemoryRing, is_supported
from npu_device._src.collectives.engines.host.queue import ArrayTransfer, HostQueue, StartedTransfer

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux on x86-64")

SLOT = Layout(2).slot_bytes


class Members:
    """Engines of a group on one mapping, and a way to do something on all of them at once."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, Layout(size).bytes)
        self.size = size
        rings = [partial(MemoryRing, memory, size, rank, lambda: None) for rank in range(size)]
        self.engines = [HostQueue(ring, HostTransferCount(), BufferPool(), -1) for ring in rings]

    def together(self, act: Callable[[int, HostQueue], Any]) -> list[Any]:
        """``act(rank, engine)`` on a thread for each member; the results."""
        with ThreadPoolExecutor(self.size) as threads:
            futures = [
                threads.submit(act, rank, engine) for rank, engine in enumerate(self.engines)
            ]
            return [future.result(30) for future in futures]


def started(
    engine: HostQueue, make_rounds: Callable[[MemoryRing], Any], background: bool
) -> StartedTransfer:
    terms = Terms((1, 2), 3, dict, False, lambda position: ValueError("heads differ"))
    return engine.start(
        ArrayTransfer([], lambda arrays, buffers: (make_rounds, [])),
        terms,
        [],
        computes_meanwhile=background,
    )


def summed(channel: MemoryRing, stream: Stream, result: np.ndarray, reduction: str) -> Any:
    return transfer_rounds.reduce(channel, stream, result, reduction, range(channel.size))


def reduced(
    engine: HostQueue,
    arrays: list[np.ndarray],
    reduction: str,
    wire: Any = None,
    result: Any = None,
) -> list[np.ndarray]:
    flats = [array.reshape(-1) for array in arrays]
    stream = Stream([array.shape for array in arrays], np.dtype(wire or arrays[0].dtype), flats)
    flat, results = stream.results(BufferPool(), np.dtype(result or arrays[0].dtype))
    transfer = started(engine, lambda channel: summed(channel, stream, flat, reduction), False)
    engine.finish(transfer)
    return results


BFLOAT16 = tf.bfloat16.as_numpy_dtype
KINDS = [  # what the values are, what they travel as, and what their mean is
    *[(dtype, dtype, dtype) for dtype in (np.float16, BFLOAT16, np.float32, np.float64)],
    *[
        (dtype, wire, dtype)
        for dtype in (np.float32, np.float64)
        for wire in (np.float16, BFLOAT16)
    ],
    *[(dtype, dtype, np.float32) for dtype in (np.int8, np.int16, np.uint8, np.uint16)],
    *[(dtype, dtype, np.float64) for dtype in (np.int32, np.int64, np.uint32, np.uint64)],
]


def lengths(size: int, item: int, wire: int) -> list[int]:
    """Both sides of what is shared, of a slot of either dtype, and of a block of shared slots."""
    slot = Layout(size).slot_bytes
    edges = {
        transfer_rounds._SCATTER_FROM_BYTES // wire,
        slot // wire,
        slot // item,
        8 * slot // max(item, wire),
    }
    return sorted(edge + more for edge in edges for more in (-1, 0, 1))


def numpys(values: list[np.ndarray], reduction: str, wire: Any, result: Any) -> np.ndarray:
    """Return the expected result: the values as they travel, combined in the order of the ranks, and rounded once."""
    wide = (
        np.float32
        if np.dtype(result).itemsize == 2 and np.dtype(result).kind not in "iu"
        else result
    )
    total = values[0].astype(wire).astype(wide)
    for other in values[1:]:
        total = FOLDS[reduction](total, other.astype(wire).astype(wide))
    return np.asarray(total / wide(len(values)) if reduction == "mean" else total).astype(result)


@pytest.mark.parametrize("count", [2, 3])
def test_every_dtype_and_wire_on_both_sides_of_every_buffer(count: int) -> None:
    members, size = Members(count), count
    chance = np.random.default_rng(size)
    values = [chance.integers(0, 100, 3 << 20) for _ in range(size)]
    # Of dtypes of one width, one on both sides; the last lengths are longer than a ring.
    cases = [(*kind, [1000, SLOT + 1]) for kind in KINDS]
    for dtype, wire in ((np.float32, np.float32), (np.float32, BFLOAT16), (np.int8, np.int8)):
        item = np.dtype(np.float32).itemsize
        longest = (Layout(2).slots + 3) * SLOT // np.dtype(dtype).itemsize
        cases.append(
            (
                dtype,
                wire,
                np.float32,
                [0, 1, *lengths(size, item, np.dtype(wire).itemsize), min(longest, 3 << 20)],
            )
        )
    for dtype, wire, mean, tried in cases:
        reductions = list(FOLDS) if dtype == wire == np.float32 else ["sum", "mean", "max"]
        for length in tried:
            mine = [value[:length].astype(dtype) for value in values]
            for reduction in reductions if dtype == wire else reductions[:2]:
                result = mean if reduction == "mean" else dtype

                def act(
                    rank: int,
                    engine: HostQueue,
                    mine: Any = mine,
                    how: Any = (reduction, wire, result),
                ) -> Any:
                    return reduced(engine, [mine[rank]], *how)

                expected = numpys(mine, reduction, wire, result)
                for [found] in members.together(act):
                    assert found.tobytes() == expected.tobytes(), (dtype, wire, reduction, length)
                    assert found.size == 0 or found.ctypes.data % ALIGNMENT == 0, (
                        "TensorFlow would copy it"
                    )


def test_starting_never_waits_and_long_jobs_proceed_by_themselves() -> None:
    members = Members(2)
    long, short = np.ones(20 * SLOT, np.float32), np.ones(3, np.float32)
    came = threading.Event()

    def act(rank: int, engine: HostQueue) -> tuple[float, float]:
        if rank == 1:
            came.wait(10)
        jobs = []
        began = time.monotonic()
        for array, background in ((short, False), (long, True), (short, False)):
            stream = Stream([array.shape], array.dtype, [array])
            flat, results = stream.results(BufferPool(), array.dtype)
            flat[:] = 0
            make_rounds = partial(summed, stream=stream, result=flat, reduction="sum")
            jobs.append((started(engine, make_rounds, background), results[0]))
        began_all = time.monotonic() - began
        came.set()
        deadline = time.monotonic() + 20
        while not (jobs[1][1] == 2).all() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (jobs[1][1] == 2).all(), (
            "nobody asked for its result, and it should have ended all the same"
        )
        for transfer, result in jobs:
            engine.finish(transfer)
            assert (result == 2).all()
        return began_all, time.monotonic() - began

    seconds = [seconds for seconds, _ in members.together(act)]
    assert max(seconds) < 5, "rank 0 starts all three before rank 1 comes"
    for engine in members.engines:
        engine.close()


def test_waiting_leaves_the_core_to_others() -> None:
    def act(rank: int, engine: HostQueue) -> float:
        time.sleep(1.0 * rank)
        began = time.thread_time()
        reduced(engine, [np.ones(4, np.float32)], "sum")
        return time.thread_time() - began

    assert Members(2).together(act)[0] < 0.2


def test_the_mapping_is_bounded() -> None:
    assert all(Layout(size).bytes <= 34 << 20 for size in (1, 2, 4, 8, 64, 256))


def test_a_buffer_is_used_again_only_when_nobody_holds_a_part_of_it() -> None:
    pool = BufferPool()
    first = pool.allocate(1 << 20)
    address, part = first.ctypes.data, first.view(np.float32)[10:20]
    del first
    second = pool.allocate(1 << 20)
    assert second.ctypes.data != address, "a part of the first one is still in use"
    del part
    assert pool.allocate(1 << 20).ctypes.data == address
