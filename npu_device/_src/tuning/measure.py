"""A short measurement on the running job: the time of all_reduce by size, for several side by side, and beside
computing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.choice import packs
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce, reduce_segments
from npu_device._src.trace import points
from npu_device._src.tuning.computing import Computing
from npu_device._src.tuning.cost_model import CostModel, fit

_SMALLEST = 4096
_PARTS = (64, 16, 4, 2, 1)  # of the largest size: segments of a split are between these
_LANES = 4
_GRADIENTS = 100  # of the largest size; smaller ones have as many fewer
_SEVERAL = 64_000_000  # bytes at most of the collective that is measured beside computing
_REPEATS = 7  # of each size
_FEWEST_REPEATS = 3
_TURNS = 10  # of a collective by itself, of one tensor, and beside computing
_FEWEST_TURNS = 2
_SECONDS = 6.0  # after this time, the minimum number of repeats is enough


def measure(job: Job, group: Group, largest: int) -> CostModel:
    """Measure and fit.

    Args:
        job: the job.
        group: the group whose all_reduce is measured.
        largest: bytes of all gradients together.

    Returns:
        The cost model, from float32 means of lists of tensors inside a ``tf.function``; the same on every rank, since
        the times are those of the last rank, which waited for nobody.

    Every rank of the group has to call it with the same arguments. It takes some seconds; over a slow link, as long as
    ten collectives of the largest size.
    """
    sizes = sorted({_SMALLEST, *(max(_SMALLEST, largest // part // 4 * 4) for part in _PARTS)})
    if len(sizes) == 1:
        sizes.append(16 * _SMALLEST)
    segments = [[_segment(size, largest)] for size in sizes]
    reductions = [_reduction(job, group, each) for each in (*segments, [[_SMALLEST]] * _LANES)]
    *times, lanes = _alternately(job, group, reductions)
    cost = fit(dict(zip(sizes, times)), {_LANES: lanes})
    return _beside_backward(job, group, cost, _segment(min(largest, _SEVERAL), largest))


def _beside_backward(job: Job, group: Group, cost: CostModel, segment: Sequence[int]) -> CostModel:
    """Return the cost model with packing, load and pace, from a segment that is reduced alone, as one tensor, and while
    all ranks compute. They take turns, so that a machine that gets slower or faster affects all of them.
    """
    size = sum(segment)
    listed, single = _reduction(job, group, [segment]), _reduction(job, group, [[size]])
    computing = Computing()
    alone: list[float] = []
    joined: list[float] = []
    beside: list[float] = []
    worked = passed = 0.0  # processor time and time of the collectives by themselves
    listed(), single()
    began = time.monotonic()
    while len(alone) < _FEWEST_TURNS or (len(alone) < _TURNS and _spent(job, group, began) < _SECONDS):
        processor, clock = time.process_time(), time.perf_counter()
        alone.append(_seconds(job, group, listed))
        worked, passed = worked + time.process_time() - processor, passed + time.perf_counter() - clock
        joined.append(_seconds(job, group, single))
        with computing:
            beside.append(_seconds(job, group, listed))
    by_itself, as_one, shared = (
        statistics.fmean(_of_the_last(job, group, seconds)) for seconds in (alone, joined, beside)
    )
    load = min(1.0, _of_all(job, group, [worked / passed / job.cores], "max")[0])
    packing = max(0.0, by_itself - as_one) / 2 if packs(job, group, tf.float32) else 0.0
    # Packing is work for the processor. The part that the collectives keep busy anyway is no better than travelling.
    packing *= 1 - load
    pace = (by_itself - 2 * packing) / (max(by_itself, shared) - 2 * packing)
    return replace(cost, beta=max(0.0, cost.beta - 2 * packing / size), pack=packing / size, load=load, pace=pace)


def _alternately(job: Job, group: Group, reductions: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Time several reductions in turn, several times, so that noise of the machine affects all of them."""
    seconds: list[list[float]] = [[] for _ in reductions]
    for reduce in reductions:
        reduce()
    began = time.monotonic()
    repeats = 0
    while repeats < _FEWEST_REPEATS or (repeats < _REPEATS and _spent(job, group, began) < _SECONDS):
        for times, reduce in zip(seconds, reductions):
            times.append(_seconds(job, group, reduce))
        repeats += 1
    return [_of_the_last(job, group, times) for times in seconds]


def _seconds(job: Job, group: Group, reduce: Callable[[], float]) -> float:
    """Return the seconds of a reduction on this rank when all ranks begin it at once."""
    _of_all(job, group, [0.0], "max")
    return reduce()


def _spent(job: Job, group: Group, began: float) -> float:
    """Return the seconds since a moment, the most on any rank, so that all ranks agree when to stop."""
    return _of_all(job, group, [time.monotonic() - began], "max")[0]


def _of_the_last(job: Job, group: Group, seconds: Sequence[float]) -> list[float]:
    """Return, for each of several reductions, the seconds of the last rank, which waited for nobody."""
    return _of_all(job, group, seconds, "min")


def _of_all(job: Job, group: Group, values: Sequence[float], reduction: str) -> list[float]:
    return [float(value) for value in all_reduce(job, tf.constant(values, tf.float64), reduction, group)]


def _segment(size: int, largest: int) -> list[int]:
    """Return the bytes of each tensor of a segment."""
    count = max(1, min(_GRADIENTS, _GRADIENTS * size // largest))
    return [max(4, size // count // 4 * 4)] * count


def _reduction(job: Job, group: Group, segments: Sequence[Sequence[int]]) -> Callable[[], float]:
    """Return a function that runs the collectives of segments with these bytes, all started at once, and returns the
    seconds from when the tensors are there until all is over.
    """

    def reduce(value: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        # As gradients travel: made by the step, so that they can be reduced where they are; and what the ranks agree on
        # beforehand hides behind the forward pass. No two are alike, or TensorFlow would make one for both.
        number = itertools.count()
        made = [[tf.fill([size // 4], value + next(number)) for size in sizes] for sizes in segments]
        begun = points.when([tensor for segment in made for tensor in segment])
        results = reduce_segments(Agreement(job), made, "mean", group, None)
        return begun, [points.reduced(result[0]) for result in results], [result[0][:1] for result in results]

    # A concrete function, since TensorFlow warns of calls that trace again, and each size does.
    called = tf.function(reduce).get_concrete_function(tf.TensorSpec([]))
    one = tf.constant(1.0)

    def seconds() -> float:
        begun, over, _ = called(one)
        return max(float(each) for each in over) - float(begun)

    return seconds
