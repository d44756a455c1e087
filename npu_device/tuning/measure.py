"""A short measurement on the very cluster: how long all_reduce takes by size, several side by side, and beside
computing.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import tensorflow as tf

from npu_device.cluster.resources import share_of_cores
from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.all_reduce import all_reduce, all_reduce_segments
from npu_device.collectives.group import Group
from npu_device.collectives.tensorflow_backend import backend as tensorflow_backend
from npu_device.profiling import points
from npu_device.tuning.cost_model import CostModel, fit

_SMALLEST = 4096
_PARTS = (64, 16, 4, 2, 1)  # of the largest size: segments of a split are between these
_LANES = 4
_GRADIENTS = 50  # of a segment, when it is measured how long it takes to put them together
_SEVERAL = 64_000_000  # bytes of them at most, and of the collective that is measured beside computing
_LAYERS, _WIDTH = 16, 512  # of what is computed beside it
_REPEATS = 7
_FEWEST_REPEATS = 2
_SECONDS = 5.0  # when the measurement has taken so long, the sizes that are left get the fewest repeats


def measure(runtime: Runtime, group: Group, largest: int) -> CostModel:
    """Measure and fit.

    Args:
        runtime: the running cluster.
        group: the group whose all_reduce is measured.
        largest: bytes of all gradients together.

    Returns:
        The cost model, from float32 sums inside a ``tf.function``; the same on every rank, since the times count of
        the rank that came last and waited for nobody.

    Every rank of the group has to call it with the same arguments. It takes some seconds, up to 20 over a slow link.
    """
    sizes = sorted({_SMALLEST, *(max(_SMALLEST, largest // part // 4 * 4) for part in _PARTS)})
    if len(sizes) == 1:
        sizes.append(16 * _SMALLEST)
    began = time.monotonic()
    samples = {size: _times(runtime, group, _reduction(runtime, group, [size]), began) for size in sizes}
    lanes = {_LANES: _times(runtime, group, _reduction(runtime, group, [_SMALLEST] * _LANES), began)}
    several = min(largest, _SEVERAL)
    cost = fit(samples, lanes)
    load, beside = _load_and_beside(runtime, group, several)
    pace = min(1.0, cost.seconds(several) / beside)
    return replace(cost, pack=_pack_seconds(runtime, group, several), load=load, pace=pace)


def _load_and_beside(runtime: Runtime, group: Group, size: int) -> tuple[float, float]:
    """The part of a rank's cores that a collective of some bytes takes while it is under way, on the busiest rank; and
    the seconds that it takes while all ranks compute.
    """
    reduce = _reduction(runtime, group, [size])
    reduce()
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(_FEWEST_REPEATS):
        reduce()
    seconds = (time.perf_counter() - started) * share_of_cores(runtime.cluster)
    load = min(1.0, (time.process_time() - worked) / seconds)
    with _computing():
        # Who gets a core when differs much from one to the next.
        times = _times(runtime, group, reduce, time.monotonic(), 3 * _REPEATS)
    return float(all_reduce(runtime, tf.constant(load, tf.float64), "max", group)), statistics.fmean(times)


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    """What the backward pass of dense layers consists of, again and again, in a thread."""
    inputs, weight = tf.ones([_WIDTH, _WIDTH]), tf.fill([_WIDTH, _WIDTH], 1 / _WIDTH)

    @tf.function
    def backward() -> list[tf.Tensor]:
        upstream, gradients = inputs, []
        for _ in range(_LAYERS):
            gradients.append(tf.matmul(inputs, upstream, transpose_a=True))
            upstream = tf.matmul(upstream, weight, transpose_b=True)
        return gradients

    _finish(backward())
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            _finish(backward())

    thread = threading.Thread(target=compute, name="computing beside a collective")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _pack_seconds(runtime: Runtime, group: Group, size: int) -> float:
    """Seconds a byte to put a segment's gradients together, and to divide and take apart what comes back: half of both,
    on the slowest rank.
    """
    if not backend.packs(runtime, group, tf.float32):
        return 0.0
    tensors = [tf.ones([max(1, size // 4 // _GRADIENTS)], tf.float32)] * _GRADIENTS

    @tf.function
    def both() -> list[tf.Tensor]:
        return tensorflow_backend.unpack(tensorflow_backend.pack(tensors) * 0.5, tensors)

    _finish(both())
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        _finish(both())
        seconds.append(time.perf_counter() - started)
    mine = statistics.median(seconds) / 2 / (4 * sum(int(tensor.shape[0]) for tensor in tensors))
    return float(all_reduce(runtime, tf.constant(mine, tf.float64), "max", group))


def _times(
    runtime: Runtime, group: Group, reduce: Callable[[], float], began: float, repeats: int = _REPEATS
) -> list[float]:
    """Seconds that a reduction takes from when the last rank has come, several times."""
    seconds: list[float] = []
    reduce()
    while len(seconds) < repeats:
        # Brings the ranks into line, too, before the next one is timed.
        spent = all_reduce(runtime, tf.constant(time.monotonic() - began, tf.float64), "max", group)
        if float(spent) > _SECONDS and len(seconds) >= _FEWEST_REPEATS:
            break
        seconds.append(reduce())
    return [float(value) for value in all_reduce(runtime, tf.constant(seconds, tf.float64), "min", group)]


def _reduction(runtime: Runtime, group: Group, sizes: Sequence[int]) -> Callable[[], float]:
    """Runs collectives of these bytes, started at once; seconds from when their tensors are there until all end."""
    tensors = [tf.ones([max(1, size // 4)], tf.float32) for size in sizes]

    def reduce() -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        # As gradients travel: made by the step, so that they can be reduced where they are; and what the ranks agree on
        # beforehand hides behind the forward pass.
        made = [tf.square(tensor) for tensor in tensors]
        begun = points.when(made)
        results = [result for [result] in all_reduce_segments(runtime, [[one] for one in made], "sum", group, None)]
        return begun, [points.reduced(result) for result in results], [result[:1] for result in results]

    # A concrete function, since TensorFlow warns of calls that trace again, and each size does.
    called = tf.function(reduce).get_concrete_function()

    def seconds() -> float:
        begun, over, _ = called()
        return max(float(each) for each in over) - float(begun)

    return seconds


def _finish(results: Sequence[tf.Tensor]) -> None:
    for result in results:
        result[:1].numpy()
