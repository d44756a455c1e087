"""The replica audit: the ranks compare digests of what an optimizer trains, and of its own state; or of the variables
whose gradients a ``tf.function`` reduces itself. ``schedule`` says when.

The digest is reduced by a collective of the step, so that it keeps its place among the step's other collectives. If it
differs, the ranks exchange what they have seen of each variable through the hub.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import DETAILS_SECONDS
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.training.watching.applied_gradients import AppliedGradients
from npu_device._src.training.watching.digests import Digest, differences, digest_of, variable_name
from npu_device._src.training.watching.own_parts import without_parts
from npu_device._src.training.watching.same_samples import Pair, SameSamples
from npu_device._src.training.watching.same_variables import not_compared
from npu_device._src.training.watching.schedule import (
    FIRST_LOOKS,
    NEVER,
    Schedule,
    can_compare,
    next_look,
)
from npu_device._src.training.watching.training_state import unique
from npu_device._src.world.world import World, value_of

_log = logging.getLogger("npu_device")

_SHARE = (
    0.0005  # of the time, so that audits that take twice as long as expected cost less than 0.1 %
)

_ADVICE = (
    "Likely cause: a rank that changed a variable alone (an assign, a callback, a restored checkpoint); variables that "
    "were made after the broadcast; a loss with another seed or learning rate on each rank, whose gradients were not "
    "reduced; or hosts with different processors, which round differently.\n"
    "What to do: make the change on every rank; broadcast again after it. NPU_DEVICE_AUDIT=1 finds the step, and "
    "NPU_DEVICE_DRIFT=warning goes on after one warning."
)


class _Seen(NamedTuple):
    """What this rank has read in an audit, after so many steps of the optimizer."""

    steps: int
    names: list[str]
    arrays: Sequence[np.ndarray]
    digests: list[Digest]


class Audit:
    """The audits of one optimizer, or of variables that are updated together; ``at_once``: also of the first step."""

    def __init__(self, world: World, at_once: bool) -> None:
        every = environment.NPU_DEVICE_AUDIT.get()
        self._world = world
        self._is_off = every == "off"
        self._every = None if every in ("auto", "off") else int(every)
        self._schedule = Schedule(world.job.device("CPU"), 1 if at_once else self._next(0, 0))
        self._samples = SameSamples(world.job)
        self._seen: _Seen | None = None
        self._equal_after: int | None = None
        self._began = self._audit_seconds = self._step_seconds = 0.0
        self._last: tuple[int, float] | None = None  # steps and time at the previous audit

    def step(
        self, variables: Sequence[Any], optimizer: Any = None, pair: Pair | None = None
    ) -> None:
        """Count a step, and audit it, if it is time, before later updates; ``pair`` is one of its gradients."""
        # Unless the optimizer is known, the ranks may have the variables in different orders.
        myself = weakref.ref(self)  # a graph must not keep the job
        self._schedule.step(
            lambda count: _audit_of(myself)._look(count, variables, optimizer, pair)
        )

    def _look(self, count: Any, variables: Sequence[Any], optimizer: Any, pair: Pair | None) -> Any:
        """Compare; return the step of the next audit."""
        myself, ordered = weakref.ref(self), optimizer is not None
        own = without_parts(compat.optimizer_variables(optimizer, variables)) if ordered else []
        audited = [] if self._is_off else unique([*variables, *own])
        names, by_hand = (
            [variable_name(one) for one in audited],
            [] if ordered else list(map(weakref.ref, variables)),
        )
        made = tf.cast(value_of(optimizer.iterations), tf.int64) if ordered else count - 1
        gradients = [] if pair is None or self._samples.is_over else [pair.mine, pair.reduced]
        given, scale = (
            len(gradients),
            0.0 if pair is None else pair.scale,
        )  # what is called must not keep tensors

        def digest(count: Any, made: Any, *arrays: np.ndarray) -> list[Any]:
            audit = _audit_of(myself)
            if given:
                audit._samples.compare(int(count), arrays[0], arrays[1], scale)
            digests = [digest_of(array) for array in arrays[given:]]
            audit._seen = _Seen(int(made), names, arrays[given:], digests)
            return [audit._message(int(count), digests if ordered else sorted(digests), by_hand)]

        def settle(most: Any, count: Any) -> list[Any]:
            return [
                np.int64(_audit_of(myself)._settle([int(number) for number in most], int(count)))
            ]

        values = [value_of(variable) for variable in audited]
        [mine] = call_now(
            digest, [count, made, *gradients, *values], [tf.TensorSpec([5], tf.int64)]
        )
        most = mine if self._is_off else all_reduce(self._world.job, mine, "max", self._world.group)
        return call_now(settle, [most, count], [tf.TensorSpec([], tf.int64)])[0]

    def _message(self, count: int, digests: list[Digest], by_hand: Sequence[Any]) -> Any:
        """Return, for maxima over the ranks: digest, minus digest, whether this rank is silent, minus its two times."""
        now = time.perf_counter()
        if self._last is not None:
            self._step_seconds = (now - self._last[1]) / max(1, count - self._last[0])
        self._last, self._began = (count, now), now
        applied = self._world.job.part(AppliedGradients)
        # While it isn't known to apply the gradients that it has reduced by hand.
        is_silent = applied is not None and any(applied.leaves_unreduced(one()) for one in by_hand)
        digest = zlib.crc32(repr(digests).encode())
        # Those who wait for the last rank don't work: the shortest of the ranks' audits is what one costs.
        return np.array(
            [digest, -digest, is_silent, -self._audit_seconds * 1e9, -self._step_seconds * 1e9],
            np.int64,
        )

    def _settle(self, most: list[int], count: int) -> int:
        """Raise or warn if the digests differ; return the step of the next audit."""
        self._audit_seconds = time.perf_counter() - self._began
        seen, self._seen = self._seen, None
        digest, negated, is_silent, cost, step = most
        if seen is not None and digest != -negated and not is_silent and not self._is_off:
            return self._tell(seen, f"drift/{self._world.group.key}/{count}/{digest}")
        self._equal_after = None if seen is None else seen.steps
        return self._next(count, math.ceil(cost / step / _SHARE) if step else 0)

    def _next(self, count: int, interval: int) -> int:
        """Return the step of the next audit, given the interval at which audits cost their share of the time."""
        if self._is_off and count >= FIRST_LOOKS[-1]:
            return NEVER
        if self._every is None:
            return next_look(count, max(FIRST_LOOKS[-1], interval))
        regular = self._every - count % self._every
        return count + regular if self._every <= FIRST_LOOKS[-1] else next_look(count, regular)

    def _tell(self, seen: _Seen, key: str) -> int:
        """Raise an error or warn, on every rank alike: which variables differ, and how far."""
        cluster, store = self._world.job.cluster, self._world.job.store
        norms = [np.linalg.norm(np.abs(array).astype(np.float64)) for array in seen.arrays]
        mine = [
            f"norm {norm:.9g}, digest {number:08x}"
            for norm, (_, _, number) in zip(norms, seen.digests)
        ]
        found = {cluster.rank: mine}
        with contextlib.suppress(ClusterError):
            found = store.gather_from(key, mine, self._world.group.ranks, DETAILS_SECONDS)
        ranks = sorted(found)
        _, which = differences(cluster, ranks, seen.names, [found[rank] for rank in ranks]) or (
            [],
            "some variables",
        )
        before = (
            ""
            if self._equal_after is None
            else f" (after step {self._equal_after} they were equal)"
        )
        text = f"the ranks have drifted apart: seen after step {seen.steps}{before}, in {which}\n{_ADVICE}"
        if environment.NPU_DEVICE_DRIFT.get() == "error":
            raise RuntimeError(f"rank {cluster.rank}: {text}")
        if self._world.rank == 0:
            _log.warning("%s\nThis optimizer is not audited any more.", text)
        return NEVER


class _AuditsByHand(dict[tuple[int, ...], Audit]):
    """The audits of variables whose gradients functions reduce themselves, by the variables' ids; a part of the job."""


def audit_by_hand(
    world: World, variables: Sequence[Any], pair: Callable[[], Pair | None] | None
) -> None:
    """Audit, if it is time, variables whose gradients a ``tf.function`` has reduced; ``pair`` returns one of these."""
    if world.size == 1 or not can_compare():
        return
    audits, key = world.job.made(_AuditsByHand), tuple(map(id, variables))
    if key not in audits:
        # Functions that are made again go on with the same count. So an audit lives as long as the first variable, and
        # not as a function, which is gone when Python's garbage collector has run, on each rank at another time.
        audits[key] = Audit(world, bool(not_compared(variables)))
        if variables:
            weakref.finalize(variables[0], audits.pop, key, None)
    audits[key].step(variables, None, None if pair is None else pair())


def _audit_of(reference: weakref.ref[Audit]) -> Audit:
    """Return the audit of a graph; raise an error if its optimizer no longer exists."""
    audit = reference()
    if audit is None:
        raise RuntimeError(
            "a function makes a step with an optimizer that no longer exists.\nWhat to do: keep a reference to the "
            "optimizer."
        )
    return audit
