"""The best segments by a cost model: an exact optimum over all ways to cut the gradients, eight segments at most.

A segment starts when its gradients and all those before them are ready: measured times that are out of order count as
noise, and its gradients are put together, ``cost.pack * bytes`` seconds. The collectives are a queue: each keeps the
others from the network for ``cost.work(bytes)`` seconds, and all have ``cost.latency`` to wait besides; then each is
taken apart, ``cost.pack * bytes`` seconds. With ``busy == alpha`` the collectives run one after the other, F_k =
max(F_k-1, ready_k) + alpha + beta * bytes_k; with ``busy == 0`` they run side by side and share the bandwidth: however
it is shared, the last of them ends when a queue would.

Collectives and backward share the processors. While both are running, a collective runs at ``cost.pace`` of its speed,
and backward is slower by the fraction ``cost.load * cost.pace``: everything after it comes ``cost.load *
cost.work(bytes)`` seconds later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_device._src.gradients.split_strategy import MAX_SEGMENTS, cut_by_default, cut_by_size, firsts_and_lasts
from npu_device._src.tuning.cost_model import CostModel

_EQUAL = (25.0,) * 4  # per cent of the bytes in each segment
_STEP = 1e-13  # the fraction by which a plan has to be better to count; above rounding errors


@dataclass(frozen=True)
class Backward:
    """The gradients of a step's backward pass, and when each is ready.

    Attributes:
        sizes: bytes of each gradient, in the order of production.
        ready: seconds from the start of the step until each gradient was there.
        end: seconds from the start of the step until backward ended.

    Raises:
        ValueError: no gradients, or not as many times as sizes.
    """

    sizes: tuple[int, ...]
    ready: tuple[float, ...]
    end: float

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.ready):
            raise ValueError(
                f"{len(self.sizes)} sizes and {len(self.ready)} times were given; expected as many, at least one"
            )


@dataclass(frozen=True)
class Plan:
    """A split, and what is expected of it.

    Attributes:
        ends: the last gradient of each segment, as ``set_split_strategy_by_idx`` takes it.
        finish: seconds from the start of the step until the last collective is over.
        exposed: seconds of it after the end of backward.
        late: seconds by which backward ends later than without collectives.
    """

    ends: tuple[int, ...]
    finish: float
    exposed: float
    late: float = 0.0

    @property
    def added(self) -> float:
        """Return the seconds by which the step is longer than without collectives."""
        return self.exposed + self.late


def predict(backward: Backward, cost: CostModel, ends: Sequence[int]) -> Plan:
    """Predict the step with a given split.

    Args:
        backward: the gradients.
        cost: the collectives.
        ends: the last gradient of each segment, strictly ascending, up to the last one.

    Raises:
        ValueError: the ends don't fit the gradients.
    """
    if list(ends) != sorted(set(ends)) or not ends or ends[0] < 0 or ends[-1] != len(backward.sizes) - 1:
        raise ValueError(
            f"ends {list(ends)} don't fit {len(backward.sizes)} gradients; expected ascending numbers of which the "
            f"last is {len(backward.sizes) - 1}"
        )
    queue = finish = -math.inf
    worked = beside = 0.0
    for ready, size in _segments(backward, ends):
        behind = cost.load * worked  # too much if the queue isn't done yet; then the queue counts
        begun = max(queue, ready + behind + cost.pack * size)
        both = float(_beside(backward.end + behind - begun, cost.work(size), cost))
        queue = begun + cost.work(size) + (1 - cost.pace) * both
        worked += cost.work(size)
        beside += both
        finish = max(finish, queue + cost.pack * size)
    finish += cost.latency
    late = cost.load * cost.pace * beside
    return Plan(tuple(ends), finish, max(0.0, finish - backward.end - late), late)


def without_collectives(backward: Backward, cost: CostModel, ends: Sequence[int]) -> Backward:
    """Return a backward pass that was measured beside collectives as it would have been without them: the reverse of
    what ``predict`` does with ``load`` and ``pace``.

    Args:
        backward: as it was measured.
        cost: the collectives.
        ends: the segments of that run.
    """
    queue = -math.inf
    shared: list[tuple[float, float]] = []  # the intervals in which backward and a collective ran together
    for ready, size in _segments(backward, ends):
        begun = max(queue, ready + cost.pack * size)
        beside = min(max(0.0, backward.end - begun), cost.work(size) / cost.pace)
        queue = begun + cost.work(size) + (1 - cost.pace) * beside
        shared.append((begun, begun + beside))

    def alone(moment: float) -> float:
        return moment - cost.load * cost.pace * sum(max(0.0, min(moment, over) - begun) for begun, over in shared)

    return Backward(backward.sizes, tuple(map(alone, backward.ready)), alone(backward.end))


def best_plan(backward: Backward, cost: CostModel, most: int = MAX_SEGMENTS, fewest: int = 1) -> Plan:
    """Return the best split, the exact optimum; of equals, the one with fewer segments.

    Args:
        backward: the gradients.
        cost: the collectives.
        most: the largest number of segments; limited to the number of gradients.
        fewest: the smallest number of segments, at most the number of gradients.
    """
    most = min(most, len(backward.sizes))
    limit, best = math.inf, None
    while True:  # as long as there is a better plan, look for one that is better still
        cuts = _soonest(backward, cost, most, limit)[fewest - 1 :]
        plans = [predict(backward, cost, ends) for ends in cuts if ends is not None]
        if not plans and best is not None:
            return best
        best = min(plans, key=lambda plan: (plan.finish, len(plan.ends)))
        if cost.pack == 0:
            return best  # the last to arrive is the last to be finished
        limit = (best.finish - cost.latency) * (1 - _STEP)


def _soonest(backward: Backward, cost: CostModel, most: int, limit: float) -> list[tuple[int, ...] | None]:
    """Return, for 1, 2, … ``most`` segments, the ends with which the last one arrives soonest and each is unpacked by
    ``limit``; None where there are none.

    Dynamic programming is exact here: the end of a segment never shrinks with the end of the one before it. It takes
    ``most`` times the square of the number of gradients.
    """
    count = len(backward.sizes)
    ready = np.maximum.accumulate(np.asarray(backward.ready, np.float64))
    given = np.cumsum(np.asarray(backward.sizes, np.float64))

    def over(begun: Any, late: Any, size: Any) -> Any:
        """Return when collectives end that begin when those before them have made backward late."""
        work = cost.work(size)
        end = begun + work + (1 - cost.pace) * _beside(backward.end + late - begun, work, cost)
        return np.where(end + cost.pack * size > limit, np.inf, end)

    finish = over(ready + cost.pack * given, 0.0, given)  # one segment up to each gradient
    cuts: list[list[int]] = []  # for each further segment and its end: the end of the segment before it
    found: list[tuple[int, ...] | None] = [(count - 1,) if finish[-1] < np.inf else None]
    for collectives in range(1, most):
        further = np.full(count, np.inf)
        late = cost.load * (collectives * cost.busy + cost.beta * given)  # the delay of everything after each end
        before = [-1] * count
        for end in range(1, count):
            size = given[end] - given[:end]
            candidates = over(np.maximum(finish[:end], ready[end] + late[:end] + cost.pack * size), late[:end], size)
            before[end] = int(np.argmin(candidates))
            further[end] = candidates[before[end]]
        cuts.append(before)
        finish = further
        found.append(_traced_back(cuts, count - 1) if finish[-1] < np.inf else None)
    return found


def contenders(backward: Backward, cost: CostModel, few: int) -> list[Plan]:
    """Return plans worth trying: the best; then repeatedly the best with at most half as many segments as the one
    before; finally four segments of equal bytes, which do well where the model is wrong.

    Adjacent numbers of segments differ by less than a few steps can show.
    """
    chosen = [best_plan(backward, cost)]
    while len(chosen) < few - 1 and len(chosen[-1].ends) > 1:
        chosen.append(best_plan(backward, cost, len(chosen[-1].ends) // 2))
    equal = equal_plan(backward, cost)
    return [*chosen, equal] if equal.ends not in (plan.ends for plan in chosen) and len(chosen) < few else chosen


def default_plan(backward: Backward, cost: CostModel) -> Plan:
    """Return the plan of Ascend's default: 96.54 % of the bytes, and the rest."""
    return predict(backward, cost, cut_by_default(backward.sizes))


def equal_plan(backward: Backward, cost: CostModel) -> Plan:
    """Return the plan of four segments with about the same bytes."""
    return predict(backward, cost, cut_by_size(backward.sizes, _EQUAL))


def per_gradient_plan(backward: Backward, cost: CostModel) -> Plan:
    """Return the plan of one collective for each gradient."""
    return predict(backward, cost, range(len(backward.sizes)))


def _segments(backward: Backward, ends: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Return, for each segment, when its gradients are ready, and their bytes."""
    ready = -math.inf
    for first, last in firsts_and_lasts(ends):
        ready = max(ready, *backward.ready[first : last + 1])
        yield ready, sum(backward.sizes[first : last + 1])


def _beside(left: Any, work: Any, cost: CostModel) -> Any:
    """Return the seconds for which a collective and the rest of backward, each given in seconds it would take alone,
    run side by side. Takes numbers, or arrays of them.
    """
    speed = 1 - cost.load * cost.pace
    whole = work / cost.pace
    return np.minimum(whole, np.maximum(left, 0.0) / speed) if speed else np.where(np.asarray(left) > 0, whole, 0.0)


def _traced_back(cuts: list[list[int]], end: int) -> tuple[int, ...]:
    ends = [end]
    for before in reversed(cuts):
        ends.append(before[ends[-1]])
    return tuple(reversed(ends))
