"""The replica audit: the ranks compare digests of what an optimizer trains, and of its own state; or of the variables
whose gradients a ``tf.function`` reduces itself. ``schedule`` says when.

What the ranks send each other are collectives of the step, so that they keep their place among its other collectives.
An audit that finds a difference goes on to find out how large it is (``drift``).
"""

from __future__ import annotations

import math
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.training.audits_by_hand import AuditsByHand
from npu_device._src.training.digests import digest_of, variable_name
from npu_device._src.training.drift import Drift
from npu_device._src.training.same_samples import Pair, SameSamples
from npu_device._src.training.same_variables import compared
from npu_device._src.training.schedule import FIRST_LOOKS, NEVER, Schedule, can_compare, next_look
from npu_device._src.training.training_state import unique
from npu_device._src.training.world import World, value_of

_SHARE = 0.0005  # of the time, so that audits that take twice as long as expected cost less than 0.1 %


class Audit:
    """The audits of one optimizer, or of variables that are updated together.

    Args:
        world: the ranks.
        at_once: the first step is audited, because the ranks couldn't compare the variables before it.

    Attributes:
        is_reduced: False once the script is known to apply other gradients than the reduced ones. The variables then
            differ, and ``applied_gradients`` tells why; an audit is silent.
    """

    def __init__(self, world: World, at_once: bool) -> None:
        every = environment.NPU_DEVICE_AUDIT.get()
        self._world = world
        self._is_off = every == "off"
        self._every = None if every in ("auto", "off") else int(every)
        self._schedule = Schedule(world.job.device("CPU"), 1 if at_once else self._next(0, 0))
        self._samples = SameSamples(world.job)
        self._drift = Drift(world)
        self._began = self._audit_seconds = self._step_seconds = 0.0
        self._last: tuple[int, float] | None = None  # steps and time at the previous audit
        self.is_reduced = True

    def step(self, variables: Sequence[Any], optimizer: Any = None, pair: Pair | None = None) -> None:
        """Count a step, and audit it if it is time. Later updates of the variables come after that.

        Args:
            variables: those that the step updates, in the same order on every rank.
            optimizer: what updates them; None if it isn't known, and the order of the variables may then differ.
            pair: a gradient of the step before and after its reduction.
        """
        myself = weakref.ref(self)  # a graph must not keep the job

        def look(count: Any) -> Any:
            return myself_of(myself)._look(count, variables, optimizer, pair)

        self._schedule.step(look)

    def _look(self, count: Any, variables: Sequence[Any], optimizer: Any, pair: Pair | None) -> Any:
        """Compare; return the step of the next audit."""
        myself = weakref.ref(self)
        audited = [] if self._is_off else [*variables, *_own(optimizer, variables)]
        names, ordered = [variable_name(variable) for variable in audited], optimizer is not None
        made = tf.cast(value_of(optimizer.iterations), tf.int64) if ordered else count - 1
        gradients = [] if pair is None or self._samples.is_over else [pair.mine, pair.reduced]
        scale = None if pair is None else pair.scale

        def digest(count: Any, made: Any, *arrays: np.ndarray) -> list[Any]:
            audit = myself_of(myself)
            if gradients_given and scale is not None:
                audit._samples.compare(int(count), arrays[0], arrays[1], scale)
            return [audit._digest(int(count), int(made), names, arrays[gradients_given:], ordered)]

        def settle(most: Any, count: Any) -> list[Any]:
            return myself_of(myself)._settle(most, int(count))

        gradients_given = len(gradients)  # a graph's tensors must not be kept by what it calls
        values = [value_of(variable) for variable in audited]
        [mine] = call_now(digest, [count, made, *gradients, *values], [tf.TensorSpec([5], tf.int64)])
        most = mine if self._is_off else all_reduce(self._world.job, mine, "max", self._world.group)
        equal, due = call_now(settle, [most, count], [tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int64)])
        return tf.cond(equal, lambda: tf.identity(due), lambda: self._drift.report(due))

    def _digest(self, count: int, made: int, names: list[str], arrays: Sequence[np.ndarray], ordered: bool) -> Any:
        """Return this rank's digest, negated too, whether it is silent, and minus its times: the ranks take the maxima.

        Without an optimizer, the ranks' variables may be in another order.
        """
        began = time.perf_counter()
        digests = [digest_of(array) for array in arrays]
        self._drift.note(names, arrays, digests, made)
        if self._last is not None:
            self._step_seconds = (began - self._last[1]) / max(1, count - self._last[0])
        self._last, self._began = (count, began), began
        digest = zlib.crc32(repr(digests if ordered else sorted(digests)).encode())
        # Those who wait for the last rank don't work: the shortest of the ranks' audits is what one costs.
        cost = max(time.perf_counter() - began, self._audit_seconds)
        return np.array([digest, -digest, not self.is_reduced, -cost * 1e9, -self._step_seconds * 1e9], np.int64)

    def _settle(self, most: Any, count: int) -> list[Any]:
        """Return whether the digests are equal, and the step of the next audit."""
        self._audit_seconds = time.perf_counter() - self._began
        digest, negated, is_silent, cost, step = (int(number) for number in most)
        equal = digest == -negated or bool(is_silent) or self._is_off
        if equal:
            self._drift.equal()
        return [np.bool_(equal), np.int64(self._next(count, math.ceil(cost / step / _SHARE) if step else 0))]

    def _next(self, count: int, interval: int) -> int:
        """Return the step of the next audit, given the interval at which audits cost their share of the time."""
        if self._is_off and count >= FIRST_LOOKS[-1]:
            return NEVER
        if self._every is None:
            return next_look(count, max(FIRST_LOOKS[-1], interval))
        regular = self._every - count % self._every
        return count + regular if self._every <= FIRST_LOOKS[-1] else next_look(count, regular)


def audit_by_hand(world: World, variables: Sequence[Any] | None, pair: Pair | None) -> None:
    """Audit the variables whose gradients a ``tf.function`` has reduced, if it is time.

    Args:
        world: the ranks.
        variables: from ``same_variables.make_equal_behind``; None if the values aren't gradients.
        pair: one of the gradients before and after its reduction.
    """
    if variables is not None and world.size > 1 and can_compare():
        audits = world.job.made(AuditsByHand)
        audit = audits.of(variables, lambda: Audit(world, not compared(variables)))
        audit.step(variables, None, pair)


def myself_of(reference: weakref.ref[Audit]) -> Audit:
    """Return the audit of a graph.

    Raises:
        RuntimeError: its optimizer no longer exists.
    """
    audit = reference()
    if audit is None:
        raise RuntimeError(
            "a function makes a step with an optimizer that no longer exists.\nWhat to do: keep a reference to the "
            "optimizer."
        )
    return audit


def _own(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the optimizer's own variables that exist now."""
    if optimizer is None:
        return []
    known = {id(variable) for variable in variables}
    own = unique(compat.optimizer_variables(optimizer, variables))
    return [variable for variable in own if id(variable) not in known]
