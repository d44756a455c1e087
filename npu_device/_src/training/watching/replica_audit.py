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
from npu_device._src.training.watching.partial_sums import without_partial_sums
from npu_device._src.training.watching.same_samples import Pair, SameSamples
from npu_device._src.training.watching.same_variables import compared_behind
from npu_device._src.training.watching.schedule import (
    FIRST_LOOKS,
    NEVER,
    Schedule,
    can_compare,
    next_look,
)
from npu_device._src.world.world import World, value_of

_log = logging.getLogger("npu_device")

# Part of the time that audits may take. If they take twice as long as expected, they still cost less than 0.1 %.
_SHARE = 0.0005

_ADVICE = (
    "Likely cause: a rank that changed a variable alone (an assign, a callback, a restored checkpoint); variables that "
    "were made after the broadcast; a loss with another seed or learning rate on each rank, whose gradients were not "
    "reduced; operations whose order varies, as of embeddings on a GPU; or hosts with different processors, which "
    "round differently.\n"
    "What to do: make the change on every rank; broadcast again after it. On GPUs, call "
    "tf.config.experimental.enable_op_determinism(). NPU_DEVICE_AUDIT=1 finds the step, and NPU_DEVICE_DRIFT=warning "
    "goes on after one warning."
)


class _Reading(NamedTuple):
    """What this rank has read in an audit, after so many steps of the optimizer."""

    steps: int
    names: list[str]
    arrays: Sequence[np.ndarray]
    digests: list[Digest]


class Audit:
    """The audits of one optimizer, or of variables that are updated together; ``at_once``: also of the first step."""

    def __init__(self, world: World, at_once: bool) -> None:
        self._world = world
        self._setting = environment.NPU_DEVICE_AUDIT.get()
        first_audit = 1
        if not at_once:
            first_audit = self._next(0, 0)
        self._schedule = Schedule(world.job.device("CPU"), first_audit)
        self._samples = SameSamples(world.job)
        self._reading: _Reading | None = None
        self._equal_after: int | None = None
        self._audit_seconds = 0.0
        # Steps and time at the previous audit.
        self._count = 0
        self._began = time.perf_counter()

    def step(self, variables: Sequence, optimizer: Any = None, pair: Pair | None = None) -> None:
        """Count a step, and audit it, if it is time, before later updates; ``pair`` is one of its gradients."""
        self._schedule.step(lambda count: self._audit_now(count, variables, optimizer, pair))

    def _audit_now(self, count: Any, variables: Sequence, optimizer: Any, pair: Pair | None) -> Any:
        """Compare; return the step of the next audit."""
        # The functions below refer to this weakly, since a graph keeps them, and must not keep the job.
        myself = weakref.ref(self)
        is_off = self._setting == "off"
        states = []
        by_hand = []
        steps = count - 1
        if optimizer is None:
            by_hand = list(map(weakref.ref, variables))
        else:
            states = without_partial_sums(compat.optimizer_variables(optimizer, variables))
            # Its own count, which goes on after a restart.
            steps = tf.cast(value_of(optimizer.iterations), tf.int64)
        audited = []
        if not is_off:
            audited = compat.unique([*variables, *states])
        names = list(map(variable_name, audited))
        # Zeros tell nothing about the samples.
        gradient, reduced, scale = Pair(tf.zeros([]), tf.zeros([]), 0.0)
        if pair is not None and not self._samples.is_over:
            gradient, reduced, scale = pair

        def digest(
            count: Any, steps: Any, gradient: np.ndarray, reduced: np.ndarray, *values: np.ndarray
        ) -> list:
            audit = _audit_of(myself)
            audit._samples.compare(int(count), gradient, reduced, scale)
            digests = list(map(digest_of, values))
            audit._reading = _Reading(int(steps), names, values, digests)
            if by_hand:
                # The order of variables may differ among ranks; sorted digests don't depend on it.
                digests = sorted(digests)
            return [audit._message(int(count), digests, by_hand)]

        def settle(maxima: Any, count: Any) -> list:
            due = _audit_of(myself)._settle(list(map(int, maxima)), int(count))
            return [np.int64(due)]

        inputs = [count, steps, gradient, reduced, *map(value_of, audited)]
        [message] = call_now(digest, inputs, [tf.TensorSpec([5], tf.int64)])
        # max(digest) is -max(-digest) only if all ranks have the same digest.
        if not is_off:
            message = all_reduce(self._world.job, message, "max", self._world.group)
        [due] = call_now(settle, [message, count], [tf.TensorSpec([], tf.int64)])
        return due

    def _message(self, count: int, digests: list[Digest], by_hand: Sequence) -> Any:
        """Return, for maxima over the ranks: digest, minus digest, whether this rank is silent, minus its two times."""
        time_now = time.perf_counter()
        step_seconds = (time_now - self._began) / max(1, count - self._count)
        self._count = count
        self._began = time_now
        applied = self._world.job.component(AppliedGradients)
        # This rank is silent while it isn't known to apply the gradients that it has reduced by hand.
        is_silent = False
        if applied is not None:
            is_silent = any(applied.leaves_unreduced(reference()) for reference in by_hand)
        # A CRC has 32 bits, so that it fits into int64 with its sign.
        checksum = zlib.crc32(repr(digests).encode())
        # Ranks that wait for the last rank don't work: an audit costs as much as the shortest of the ranks' audits.
        times = [-self._audit_seconds * 1e9, -step_seconds * 1e9]
        return np.array([checksum, -checksum, is_silent, *times], np.int64)

    def _settle(self, maxima: list[int], count: int) -> int:
        """Raise or warn if the digests differ; return the step of the next audit."""
        self._audit_seconds = time.perf_counter() - self._began
        reading = self._reading
        self._reading = None
        assert reading is not None, "each audit reads before it settles"
        checksum, negated, is_silent, cost, step = maxima
        if checksum != -negated and not is_silent and self._setting != "off":
            return self._report(reading, f"drift/{self._world.group.key}/{count}/{checksum}")
        self._equal_after = reading.steps
        return self._next(count, math.ceil(cost / step / _SHARE))

    def _next(self, count: int, interval: int) -> int:
        """Return the step of the next audit, given the interval at which audits cost their share of the time."""
        if self._setting == "off" and count >= FIRST_LOOKS[-1]:
            return NEVER
        if self._setting in ("auto", "off"):
            return next_look(count, max(FIRST_LOOKS[-1], interval))
        regular = int(self._setting) - count % int(self._setting)
        # A short interval has enough looks without the first ones.
        if int(self._setting) <= FIRST_LOOKS[-1]:
            return count + regular
        return next_look(count, regular)

    def _report(self, reading: _Reading, key: str) -> int:
        """Raise an error or warn, on every rank alike: which variables differ, and how far."""
        cluster = self._world.job.cluster
        texts = []
        for array, (_, _, digest) in zip(reading.arrays, reading.digests):
            sizes = np.abs(array).astype(np.float64)
            norm = np.linalg.norm(sizes)
            texts.append(f"norm {norm:.9g}, digest {digest:08x}")
        # This rank's own answer stays if the others can't be asked.
        answers = {cluster.rank: texts}
        with contextlib.suppress(ClusterError):
            members = self._world.group.ranks
            answers = self._world.job.control.gather_from(key, texts, members, DETAILS_SECONDS)
        ranks = sorted(answers)
        texts_of_ranks = [answers[rank] for rank in ranks]
        _, differing = differences(cluster, ranks, reading.names, texts_of_ranks)
        variables = differing or "some variables"
        earlier = ""
        if self._equal_after is not None:
            earlier = f" (after step {self._equal_after} they were equal)"
        text = f"the ranks have drifted apart: seen after step {reading.steps}{earlier}, in {variables}\n{_ADVICE}"
        if environment.NPU_DEVICE_DRIFT.get() == "error":
            raise RuntimeError(f"rank {cluster.rank}: {text}")
        if self._world.rank == 0:
            _log.warning("%s\nThis optimizer is not audited any more.", text)
        return NEVER


class _LoopAudits(dict[tuple[int, ...], Audit]):
    """The audits of variables whose gradients a loop of the script reduces, by their ids; a component of the job."""


def audit_loop(world: World, variables: Sequence, pair: Callable[[], Pair | None] | None) -> None:
    """Audit, if it is time, variables whose gradients a ``tf.function`` has reduced; ``pair`` returns one of these."""
    if world.size == 1 or not can_compare():
        return
    audits = world.job.component_or_new(_LoopAudits)
    key = tuple(map(id, variables))
    if key not in audits:
        # Functions that are made again go on with the same count. So an audit lives as long as the first variable, and
        # not as a function, which is gone when Python's garbage collector has run, on each rank at another time.
        audits[key] = Audit(world, bool(compared_behind.others(variables)))
        if variables:
            weakref.finalize(variables[0], audits.pop, key, None)
    gradients = None
    if pair is not None:
        gradients = pair()
    audits[key].step(variables, None, gradients)


def _audit_of(reference: weakref.ref[Audit]) -> Audit:
    """Return the audit of a graph; raise an error if its optimizer no longer exists."""
    audit = reference()
    if audit is None:
        raise RuntimeError(
            "a function makes a step with an optimizer that no longer exists.\nWhat to do: keep a reference to the "
            "optimizer."
        )
    return audit
