"""A short measurement on the very cluster: how long all_reduce takes by size, and several side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import cast

import tensorflow as tf

from npu_device.cluster.resources import share_of_cores
from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.all_reduce import all_reduce, all_reduce_segments
from npu_device.collectives.group import Group
from npu_device.collectives.tensorflow_backend import backend as tensorflow_backend
from npu_device.tuning.cost_model import CostModel, fit

_SMALLEST = 4096
_PARTS = (64, 16, 4, 2, 1)  # of the largest size: segments of a split are between these
_LANES = 4
_GRADIENTS = 50  # of a segment, when it is measured how long it takes to put them together
_SEVERAL = 64_000_000  # bytes of them at most, and of the collective whose load is measured
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
        The cost model, from float32 sums inside a ``tf.function``; the same on every rank, since the slowest rank's
        times count.

    Every rank of the group has to call it with the same arguments. It takes a few seconds.
    """
    sizes = sorted({_SMALLEST, *(max(_SMALLEST, largest // part // 4 * 4) for part in _PARTS)})
    if len(sizes) == 1:
        sizes.append(16 * _SMALLEST)
    began = time.monotonic()
    samples = {size: _times(runtime, group, [size], began) for size in sizes}
    lanes = {_LANES: _times(runtime, group, [_SMALLEST] * _LANES, began)}
    several = min(largest, _SEVERAL)
    return fit(samples, lanes, _pack_seconds(runtime, group, several), _load(runtime, group, several))


def _load(runtime: Runtime, group: Group, size: int) -> float:
    """The part of a rank's cores that a collective of some bytes takes while it is under way, on the busiest rank."""
    reduce = _reduction(runtime, group, [size])
    _finish(reduce())
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(_FEWEST_REPEATS):
        _finish(reduce())
    seconds = (time.perf_counter() - started) * share_of_cores(runtime.cluster)
    mine = min(1.0, (time.process_time() - worked) / seconds)
    return float(all_reduce(runtime, tf.constant(mine, tf.float64), "max", group))


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


def _times(runtime: Runtime, group: Group, sizes: Sequence[int], began: float) -> list[float]:
    """Seconds that collectives of these bytes take which are started at once, on the slowest rank."""
    called = _reduction(runtime, group, sizes)
    seconds: list[float] = []
    _finish(called())
    while len(seconds) < _REPEATS:
        # Brings the ranks into line, too, before the next one is timed.
        spent = all_reduce(runtime, tf.constant(time.monotonic() - began, tf.float64), "max", group)
        if float(spent) > _SECONDS and len(seconds) >= _FEWEST_REPEATS:
            break
        started = time.perf_counter()
        _finish(called())
        seconds.append(time.perf_counter() - started)
    return [float(value) for value in all_reduce(runtime, tf.constant(seconds, tf.float64), "max", group)]


def _reduction(runtime: Runtime, group: Group, sizes: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """Collectives of these bytes, started at once."""
    tensors = [tf.ones([max(1, size // 4)], tf.float32) for size in sizes]

    def reduce() -> list[tf.Tensor]:
        # As gradients travel: what the ranks agree on beforehand hides behind the forward pass.
        segments = [[tensor] for tensor in tensors]
        return [result for [result] in all_reduce_segments(runtime, segments, "sum", group, None)]

    # A concrete function, since TensorFlow warns of calls that trace again, and each size does.
    return cast("Callable[[], list[tf.Tensor]]", tf.function(reduce).get_concrete_function())


def _finish(results: Sequence[tf.Tensor]) -> None:
    for result in results:
        result[:1].numpy()
