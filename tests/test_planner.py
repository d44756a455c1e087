"""The planner finds the best of all ways to cut, for collectives in a queue and for those that share the bandwidth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from npu_device._src.gradients.split_strategy import cut_by_default
from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import (
    Backward,
    best_plan,
    contenders,
    default_plan,
    per_gradient_plan,
    predict,
    without_collectives,
)

# Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms" (INFOCOM 2019):
# an all-reduce over 16 nodes and 10 GbE.
PUBLISHED = CostModel(9.08e-4, 7.40e-10, busy=9.08e-4)


def instance(seed: int, most: int = 12) -> tuple[Backward, CostModel]:
    """A random backward pass, and collectives between a queue and side by side."""
    chance = random.Random(seed)
    count = chance.randint(1, most)
    ready, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(1 / 0.01)
        ready.append(now + chance.choice([0, 0, chance.uniform(-0.02, 0.02)]))
    sizes = tuple(chance.choice([4, 10_000, 1_000_000, 8_000_000]) for _ in range(count))
    alpha = chance.choice([0.0, 1e-4, 5e-3])
    beta, busy = chance.choice([1e-10, 1e-9, 1e-8]), alpha * chance.choice([0.0, 0.3, 1.0])
    pack, load = chance.choice([0.0, 1e-10, 1e-9]), chance.choice([0.0, 0.4, 1.0])
    pace = chance.choice([1.0, 0.5, 0.9])
    cost = CostModel(alpha, beta, busy, pack=pack, load=load, pace=pace)
    return Backward(sizes, tuple(ready), max(ready) + chance.choice([0, 0.004])), cost


def every_cut(count: int, most: int) -> list[tuple[int, ...]]:
    last = count - 1
    return [
        (*inner, last) for number in range(min(most, count)) for inner in itertools.combinations(range(last), number)
    ]


def in_a_queue(backward: Backward, cost: CostModel, ends: Sequence[int]) -> float:
    """The issue's formula, word for word."""
    finish, start = float("-inf"), 0
    for end in ends:
        ready = max(backward.ready[: end + 1])
        finish = max(finish, ready) + cost.alpha + cost.beta * sum(backward.sizes[start : end + 1])
        start = end + 1
    return finish


def sharing(backward: Backward, cost: CostModel, ends: Sequence[int]) -> float:
    """Transfers that share the bandwidth evenly, followed from event to event."""
    starts = [0, *(end + 1 for end in ends[:-1])]
    coming = sorted(
        (max(backward.ready[: end + 1]) + cost.alpha, cost.beta * sum(backward.sizes[start : end + 1]))
        for start, end in zip(starts, ends)
    )
    now, left = float("-inf"), []
    while coming or left:
        if not left:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            left.append(coming.pop(0)[1])
        step = min(left) * len(left)
        if coming:
            step = min(step, coming[0][0] - now)
        left = [work - step / len(left) for work in left]
        left = [work for work in left if work > 1e-15]
        now += step
    return now


def beside_each_other(backward: Backward, cost: CostModel, ends: Sequence[int]) -> tuple[list[float], float, float]:
    """Backward and a queue of collectives that slow each other down, followed from event to event: when each gradient
    is ready, when backward ends, when the last collective does.
    """
    moments = [*itertools.accumulate(backward.ready, max), backward.end]
    sizes = [sum(backward.sizes[start : end + 1]) for start, end in zip([0, *(end + 1 for end in ends)], ends)]
    now = made = finish = 0.0
    seen: list[float] = []
    for end, size in zip(ends, sizes):
        while len(seen) <= end:  # nothing travels: backward goes on at its full speed
            now, made = now + moments[len(seen)] - made, moments[len(seen)]
            seen.append(now)
        while len(seen) < len(moments) and moments[len(seen)] <= made:
            seen.append(now)
        left = cost.alpha + cost.beta * size
        while left > 0:
            computing = len(seen) < len(moments)
            pace = cost.pace if computing else 1.0
            speed = 1 - cost.load * pace
            until_next = (moments[len(seen)] - made) / speed if speed and computing else float("inf")
            if until_next * pace <= left:
                now, made, left = now + until_next, moments[len(seen)], left - until_next * pace
                seen.append(now)
            else:
                now, made, left = now + left / pace, made + left / pace * speed, 0.0
        finish = now
    while len(seen) < len(moments):
        now, made = now + moments[len(seen)] - made, moments[len(seen)]
        seen.append(now)
    return seen[:-1], seen[-1], finish


@pytest.mark.parametrize("seed", range(40))
def test_collectives_and_backward_slow_each_other_down(seed: int) -> None:
    backward, cost = instance(seed)
    in_order = Backward(backward.sizes, tuple(itertools.accumulate(backward.ready, max)), backward.end)
    cost = CostModel(cost.alpha, cost.beta, busy=cost.alpha, load=0.7 if cost.load == 0 else cost.load, pace=cost.pace)
    for ends in every_cut(len(backward.sizes), 3):
        ready, end, finish = beside_each_other(in_order, cost, ends)
        plan = predict(in_order, cost, ends)
        assert plan.finish == pytest.approx(finish, rel=1e-9)
        assert plan.late == pytest.approx(end - backward.end, rel=1e-9, abs=1e-12)
        assert plan.exposed == pytest.approx(max(0.0, finish - end), rel=1e-9, abs=1e-12)
        measured = Backward(backward.sizes, tuple(ready), end)
        alone = without_collectives(measured, cost, ends)
        assert alone.ready == pytest.approx(in_order.ready, rel=1e-9)
        assert alone.end == pytest.approx(backward.end, rel=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_is_the_best_of_all(seed: int) -> None:
    backward, cost = instance(seed)
    everything = [predict(backward, cost, ends).finish for ends in every_cut(len(backward.sizes), 8)]
    assert best_plan(backward, cost).finish == pytest.approx(min(everything), rel=1e-12)


def test_the_best_plan_of_sixteen_gradients_is_the_best_of_all() -> None:
    backward, cost = next(found for found in (instance(seed, 16) for seed in range(1000)) if len(found[0].sizes) == 16)
    everything = [predict(backward, cost, ends).finish for ends in every_cut(16, 8)]
    assert len(everything) == 16384
    assert best_plan(backward, cost).finish == pytest.approx(min(everything), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_plan_of_each_number_of_segments(seed: int) -> None:
    backward, cost = instance(seed, 10)
    for number in range(1, min(8, len(backward.sizes)) + 1):
        plan = best_plan(backward, cost, number, fewest=number)
        exactly = [ends for ends in every_cut(len(backward.sizes), number) if len(ends) == number]
        assert plan.ends in exactly
        assert plan.finish == pytest.approx(min(predict(backward, cost, ends).finish for ends in exactly), rel=1e-12)
        assert plan.finish == pytest.approx(predict(backward, cost, plan.ends).finish, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_one_after_the_other_is_the_queue_of_the_formula(seed: int) -> None:
    backward, cost = instance(seed)
    queue = CostModel(cost.alpha, cost.beta, busy=cost.alpha)
    for ends in every_cut(len(backward.sizes), 3):
        assert predict(backward, queue, ends).finish == pytest.approx(in_a_queue(backward, queue, ends), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_side_by_side_ends_when_shared_bandwidth_ends(seed: int) -> None:
    backward, cost = instance(seed)
    parallel = CostModel(cost.alpha, cost.beta, busy=0.0)
    for ends in every_cut(len(backward.sizes), 3):
        assert predict(backward, parallel, ends).finish == pytest.approx(sharing(backward, parallel, ends), rel=1e-9)


def test_published_all_reduce_of_resnet50() -> None:
    """25.6 million parameters in 161 gradients, nothing to hide behind: merged 161 latencies become one."""
    sizes = (102_228_128 - 160 * 4, *(4 for _ in range(160)))
    backward = Backward(sizes, (0.0,) * 161, 0.0)
    one = best_plan(backward, PUBLISHED)
    assert one.ends == (160,)
    assert one.exposed == pytest.approx(9.08e-4 + 102_228_128 * 7.40e-10)
    assert one.exposed == pytest.approx(0.07656, abs=1e-5)
    assert per_gradient_plan(backward, PUBLISHED).exposed == pytest.approx(0.22184, abs=1e-5)


def test_published_merging_condition() -> None:
    """Two gradients are better merged exactly when the second is ready before the first one's latency would be over, if
    nothing else is under way.
    """
    first = 1_000_000
    for gap, segments in ((0.9 * 9.08e-4, 1), (1.1 * 9.08e-4, 2)):
        backward = Backward((first, 1_000), (0.0, gap), gap)
        assert len(best_plan(backward, PUBLISHED).ends) == segments


def test_communication_that_fits_under_backward_leaves_the_last_segment_exposed() -> None:
    backward = Backward((1_000_000,) * 10, tuple(0.1 * number for number in range(1, 11)), 1.0)
    cost = CostModel(1e-3, 1e-8, busy=1e-3)
    assert best_plan(backward, cost).exposed == pytest.approx(1e-3 + 0.01)
    assert default_plan(backward, cost) == predict(backward, cost, cut_by_default(backward.sizes))
    assert predict(backward, cost, [9]).exposed == pytest.approx(1e-3 + 0.1)


def test_packing_is_hidden_behind_other_segments() -> None:
    """Everything ready at once on a slow link: in one piece it is packed before, and unpacked after, all travel."""
    backward = Backward((25_000_000,) * 4, (0.1,) * 4, 0.1)
    cost = CostModel(0.0, 8e-9, pack=5e-10)
    assert predict(backward, cost, [3]).exposed == pytest.approx(0.05 + 0.8 + 0.05)
    assert predict(backward, cost, [0, 1, 2, 3]).exposed == pytest.approx(0.0125 + 0.8 + 0.0125)
    assert best_plan(backward, cost).ends == (0, 1, 2, 3)


def test_contenders_halve_the_number_of_segments_and_end_with_equal_ones() -> None:
    sizes = (*(1_000_000,) * 31, 9_000_000)
    backward = Backward(sizes, tuple(0.01 * number for number in range(1, 33)), 0.32)
    cost = CostModel(1e-5, 1e-8, busy=1e-5)
    *plans, equal = contenders(backward, cost, 4)
    numbers = [len(plan.ends) for plan in plans]
    assert numbers[0] == len(best_plan(backward, cost).ends) > 1
    assert all(later <= earlier // 2 for earlier, later in zip(numbers, numbers[1:]))
    assert equal.ends == (9, 19, 29, 31), "10, 10, 10 and 10 MB"


def test_contenders_are_different() -> None:
    assert [plan.ends for plan in contenders(Backward((4,), (0.1,), 0.1), CostModel(1e-3, 1e-9), 3)] == [(0,)]


@pytest.mark.parametrize("ends", [[], [1, 1, 2], [2, 1], [0, 1], [0, 3], [-1, 2]])
def test_ends_that_do_not_fit(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="3 gradients; expected ascending numbers of which the last is 2"):
        predict(Backward((4, 4, 4), (0.1, 0.2, 0.3), 0.3), CostModel(0.0, 1e-9), ends)
