"""While a job is open, a wrapper on the methods through which Keras optimizers apply gradients asks: were they reduced?

In a function, the graph tells. In eager mode a gradient may be the very result of a reduction. Where clipping or
scaling hides that, or a function got the gradients as arguments, the ranks post a few sums of their gradients in the
steps of the schedule, and whoever finds them all looks: gradients that are equal on two ranks were reduced, or computed
from the same data. If XLA compiles the step, how its variables have changed is posted instead: of a ``fit`` by the
graph around it, of the script's own loop when something is reduced, such as its loss. No rank waits for another, and
what is found is a warning, which never ends a training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.job import Job, current
from npu_device._src.gradients.reduction import ReducedTensors, dense_of
from npu_device._src.training.watching.digests import BROADCAST, checksum, different_start, named, variable_name
from npu_device._src.training.watching.last_word import LastWord
from npu_device._src.training.watching.same_samples import Pair, SameSamples
from npu_device._src.training.watching.schedule import FIRST_LOOKS, NEVER, Schedule, can_compare, next_look

_log = logging.getLogger("npu_device")

_KEPT = 32  # optimizers of a signature, and signatures
_SUMMED = 16  # gradients, the smallest ones
_ROUNDING = 1e-3  # of the sum of a gradient's absolute values: hosts with other processors round differently
_LAST_LOOK = 1000  # steps, when ranks that have posted nothing are not waited for any more

_NOT_REDUCED = (
    "the ranks apply gradients that were not reduced%s: the optimizer %s has made %d steps, and each of the %d ranks "
    "trains a model of its own.\nLikely cause: the result of all_reduce isn't used (it returns the reduced gradients, "
    "and leaves its arguments as they are); the optimizer isn't wrapped; another model than the replicated one is "
    "trained, such as one loaded or cloned later; or only the loss is reduced, for printing.\nWhat to do: call model = "
    "npu.distribute.replicate(model) before fit, for each model; or in the training loop gradients = "
    "npu.distribute.all_reduce(gradients) before they are applied. If the variables are averaged at longer intervals "
    "(local SGD), average them once before the first step, too: then this isn't said."
)

_Sums = list[list[float]]  # for each gradient its sum, and that of its absolute values


class _Watched:
    """What is known of one optimizer."""

    def __init__(self, job: Job, kind: str, variables: Sequence[Any]) -> None:
        self.kind = kind
        numbers = sum(int(np.prod(tuple(variable.shape))) for variable in variables)
        self.signature = f"{len(variables)} variables, {numbers} numbers"  # the same on every rank
        self.variables = list(map(weakref.ref, variables))
        self.trained = {id(compat.inner_variable(variable)) for variable in variables}
        self.schedule = Schedule(job.device("CPU"), FIRST_LOOKS[0])
        self.samples = SameSamples(job)
        self.is_reduced: bool | None = None  # what it applies; None as long as that isn't known
        self.posted: list[Any] | None = None  # a step, and sums of its gradients
        self.before: list[np.ndarray] = []  # what XLA trains, before its first step
        self.start: tuple[str, list[int]] | None = None  # an eager loop's checksums, until they have been compared

    def living(self) -> list[Any]:
        """Return the variables that still exist."""
        return [variable for reference in self.variables if (variable := reference()) is not None]


class AppliedGradients:
    """The optimizers that apply gradients in a job, and the wrapper on their classes; a part of the job."""

    def __init__(self, job: Job, last_word: LastWord) -> None:
        self._job = job
        self._last_word = last_word
        self._posts: dict[str, deque[list[Any]]] = {}  # steps and sums, by signature
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._compiled: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()  # by XLA, in own loops
        self._replaced: list[tuple[type, str, Any, Any]] = []
        self._pair: Pair | None = None
        self._reduced_now = 0  # tensors since the last eager step
        self._starts: Counter[str] = Counter()  # by signature
        self._averaged: set[int] = set()  # the ids of variables that are reduced themselves
        self._missing = {"keras", "tf_keras"}
        self.find_keras()

    def find_keras(self) -> None:
        """Wrap the methods of each Keras that has been imported since the last call."""
        if sys.modules.keys().isdisjoint(self._missing):  # at each call: there are thousands of modules
            return
        for kind, name in set(compat.optimizer_methods()).difference(each[:2] for each in self._replaced):
            original = vars(kind)[name]
            hook = _hook(original, "grads" if name == "apply" else "grads_and_vars")
            setattr(kind, name, hook)
            self._replaced.append((kind, name, original, hook))
        self._missing -= {kind.__module__.split(".", 1)[0] for kind, _, _, _ in self._replaced}

    def close(self) -> None:
        """Give Keras's classes their methods back."""
        for kind, name, original, hook in reversed(self._replaced):
            if vars(kind).get(name) is hook:
                setattr(kind, name, original)

    def note_reduced(self, values: Sequence[Any], pair: Callable[[], Pair | None] | None) -> None:
        """Note what is reduced by hand: in eager mode gradients, of which ``pair`` returns one before and after its
        reduction among all ranks; or variables, as in local SGD, whose gradients then needn't be.
        """
        if tf.executing_eagerly() and pair is not None:
            self._reduced_now += len(values)
            if any(watched.schedule.is_due() for watched in self._watched.values()):
                self._pair = pair() or self._pair
            for watched in self._compiled.values():
                self._look_at_compiled(watched)
        self._averaged.update(id(compat.inner_variable(value)) for value in values if hasattr(value, "assign"))
        for watched in self._watched.values():
            if watched.is_reduced is None and (watched.posted or not tf.executing_eagerly()):
                with contextlib.suppress(Exception):  # whoever watches never ends a training
                    known = [one for one in watched.living() if _is_value_of(one, values)]
                    self._averaged |= {id(compat.inner_variable(one)) for one in known}

    def leaves_unreduced(self, variable: Any) -> bool:
        """Return whether an optimizer has applied gradients to a variable that aren't known to be reduced."""
        key = id(compat.inner_variable(variable))
        return any(key in watched.trained and not watched.is_reduced for watched in self._watched.values())

    def skips(self, optimizer: Any) -> bool:
        """Return True for an eager step in which nothing is to be looked at, which is counted here."""
        watched = self._watched.get(optimizer)
        has_start = watched is not None and watched.start is not None and watched.is_reduced
        if watched is None or not tf.executing_eagerly() or watched.schedule.is_due() or has_start:
            return False
        self._pair, self._reduced_now = None, 0
        watched.schedule.step(lambda count: NEVER)
        return True

    def look(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Look at the gradients that an optimizer is about to apply to variables, if it is time."""
        watched, eager = self._watched.get(optimizer), tf.executing_eagerly()
        present = [(one, variable) for one, variable in pairs if tf.is_tensor(dense_of(one))]
        can_look = can_compare() and tf.distribute.get_strategy().num_replicas_in_sync == 1
        if not present or not can_look or hasattr(optimizer, "inner_optimizer"):
            return
        is_new, is_wrapped = watched is None, reduction_of(optimizer) is not None
        variables = [variable for _, variable in pairs]
        graph = None
        if compat.compiled_by_xla():  # which can't call what compares: the graph around it does, by the variables
            self._last_word.add_if_equal(variables)
            graph = compat.graph_around_xla()
            if graph is None:
                if not (is_wrapped or optimizer in self._compiled):
                    watched = self._compiled[optimizer] = _Watched(self._job, type(optimizer).__name__, variables)
                    watched.schedule = Schedule(self._job.device("CPU"), 1)
                return
        if watched is None:
            watched = self._watched[optimizer] = _Watched(self._job, type(optimizer).__name__, variables)
        applied = [one for one, _ in present]
        missing = [] if is_wrapped else self._job.made(ReducedTensors).missing_in(applied)
        if not missing and not watched.is_reduced:
            watched.is_reduced = True
            self._last_word.add_optimizer(optimizer, variables)
        if is_wrapped or not (missing or eager):
            return
        if graph is not None and is_new:
            with tf.init_scope():
                watched.before = _arrays(variables)
        pair, self._pair = self._pair if eager else None, None
        are_all, self._reduced_now = self._reduced_now >= len(present), 0
        some = set(map(id, missing if len(missing) < len(present) else ()))
        only = [(id(compat.inner_variable(one)), variable_name(one)) for each, one in present if id(each) in some]

        def look_now(count: Any) -> Any:
            if pair is not None and any(dense_of(one).shape == pair.mine.shape for one in applied):
                watched.samples.compare(count, compat.to_array(pair.mine), compat.to_array(pair.reduced), pair.scale)
            looked_at = missing if graph is None else map(tf.convert_to_tensor, variables)
            return call_now(post, [count, *_smallest(looked_at)], [tf.TensorSpec([], tf.int64)])[0]

        def checksums(variables: Sequence[Any]) -> list[int]:
            return [checksum(tf.convert_to_tensor(variable)) for variable in variables]

        def post(count: Any, *arrays: np.ndarray) -> list[Any]:
            due = self._post(watched, int(count), arrays, only)
            return [np.int64(min(due, next_look(int(count), NEVER)) if eager else due)]

        # In functions ``same_variables`` compares the start, while they are traced.
        if is_new and eager and environment.NPU_DEVICE_UNEQUAL_START.get() != "ignore":
            self._starts[watched.signature] += 1
            name = f"start {self._starts[watched.signature]} of {watched.signature}"
            watched.start = (name, checksums(variables)) if sum(self._starts.values()) <= _KEPT else None
        with contextlib.ExitStack() as around:
            if graph is not None:
                around.enter_context(graph.as_default())
                around.enter_context(tf.control_dependencies(None))  # and out of the call that XLA compiles
            watched.schedule.step(look_now)
        if watched.start is not None and watched.is_reduced and are_all and not is_new:
            (name, start), watched.start = watched.start, None
            # What is equal by now was broadcast after the first step, as Horovod's scripts do.
            names = list(map(variable_name, variables))
            text = different_start(self._job, name, names, BROADCAST, start, checksums(variables))
            if text is not None:
                _log.warning("%s", text)

    def _look_at_compiled(self, watched: _Watched) -> None:
        """Count what is reduced beside a step that XLA compiles, and look at its variables if it is time."""

        def look(count: int) -> int:
            if watched.before:
                return self._post(watched, int(count), _arrays(watched.living()), [])
            watched.before = _arrays(watched.living())  # after the first step, behind which a script may broadcast
            return next_look(int(count), NEVER)

        with contextlib.suppress(Exception):  # whoever watches never ends a training
            watched.schedule.step(look)

    def _post(self, watched: _Watched, count: int, arrays: Sequence[np.ndarray], only: list[tuple[int, str]]) -> int:
        due = NEVER
        with contextlib.suppress(Exception):  # whoever watches never ends a training; another rank may have told
            before = watched.before or map(np.zeros_like, arrays)
            values = [array.astype(np.float64) - one for array, one in zip(arrays, before)]
            sums = [[float(each.sum()), float(np.abs(each).sum())] for each in values]
            due = self._post_sums(watched, count, sums, only)
        return due

    def _post_sums(self, watched: _Watched, count: int, sums: _Sums, only: list[tuple[int, str]]) -> int:
        """Post sums of the gradients that aren't known to be reduced, with those of earlier optimizers like this one:
        another rank may be behind by one. Look at what all ranks posted in an earlier step; return the step of the next
        look. ``only`` has ids and names of their variables if other gradients were reduced.
        """
        if watched.is_reduced is not None or self._job.health.is_over or not sums:
            return NEVER
        earlier, size, mine = watched.posted, self._job.cluster.world_size, self._job.cluster.rank
        signature = f"{len(sums)} gradients of {watched.signature}"
        posts = self._posts.setdefault(signature, deque(maxlen=_KEPT))
        if earlier is None and np.any(sums) and np.all(np.isfinite(sums)):
            watched.posted = [count, sums]
            posts.append(watched.posted)
        if len(self._posts) > _KEPT:
            del self._posts[next(iter(self._posts))]
        posted = self._job.store.post(f"gradients: {signature}", list(posts))
        if earlier is None:
            return next_look(count, count)
        # If these were reduced, the other ranks have posted theirs by now.
        own = _own({rank: [one for step, one in each if step == earlier[0]] for rank, each in posted.items()})
        if len(own) == size and earlier[1] not in own[mine]:
            watched.is_reduced = True
        elif len(own) == size and all(own.values()) and not self._may_be_averaged_later(watched):
            watched.is_reduced = False
            # Some of the variables may be meant for this rank alone, unless they were equal on all ranks.
            known = [self._last_word.calls_before(number) for number, _ in only]
            if None not in known and not self._are_equal_otherwise(watched):
                models = min(map(len, own.values()))
                self._job.store.set(f"told about {models} models of {signature}", "")
                of_those = f" for {named([name for _, name in only])}" if only else ""
                _log.warning(_NOT_REDUCED, of_those, watched.kind, count, size)
        return next_look(count, count) if watched.is_reduced is None and count < _LAST_LOOK else NEVER

    def _may_be_averaged_later(self, watched: _Watched) -> bool:
        """Return whether what an optimizer trains may be averaged for the first time much later, as in local SGD: since
        it has been made equal, nothing was reduced. If it never is, ``last_word`` names it.
        """
        calls = self._job.made(ReducedTensors).calls
        return calls == 0 or all(self._last_word.calls_before(number) == calls for number in watched.trained)

    def _are_equal_otherwise(self, watched: _Watched) -> bool:
        """Return whether what an optimizer trains is reduced itself, or by another optimizer, as in local SGD."""
        others = [other.trained for other in self._watched.values() if other.is_reduced]
        return any(not watched.trained.isdisjoint(other) for other in [*others, self._averaged])


def _own(rows: dict[int, list[_Sums]]) -> dict[int, list[_Sums]]:
    """Return, for each rank, the sums that no other rank has."""
    others = {rank: [each for other, sums in rows.items() if other != rank for each in sums] for rank in rows}
    return {
        rank: [one for one in mine if not any(_are_alike(np.array(one), np.array(each)) for each in others[rank])]
        for rank, mine in rows.items()
    }


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    return bool(np.all(np.abs(one - other) <= _ROUNDING * np.maximum(one, other)[:, 1:]))


def _smallest(gradients: Iterable[Any]) -> list[Any]:
    """Return the tensors of the smallest gradients, or variables, with floating-point numbers."""
    known = [tensor for tensor in map(dense_of, gradients) if tensor.dtype.is_floating]
    return sorted(known, key=lambda tensor: tensor.shape.num_elements() or sys.maxsize)[:_SUMMED]


def _arrays(variables: Iterable[Any]) -> list[np.ndarray]:
    return list(map(compat.to_array, _smallest(map(tf.convert_to_tensor, variables))))


def _is_value_of(variable: Any, values: Sequence[Any]) -> bool:
    """Return whether the value of a variable is among some values."""
    alike = [one for one in values if isinstance(one, tf.Tensor) and one.shape == variable.shape]
    if tf.executing_eagerly() and alike:
        value = compat.to_array(tf.convert_to_tensor(variable))
        return bool(value.any()) and any(np.array_equal(compat.to_array(one), value) for one in alike)
    handles = {handle.name for known, handle in compat.variables_read() if known is compat.inner_variable(variable)}
    reads = [one.op.inputs[0].op if one.op.type == "Identity" else one.op for one in alike]
    return any(read.type == "ReadVariableOp" and read.inputs[0].name in handles for read in reads)


def _hook(original: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    """Return a method that looks at its gradients, or reduces them, before the original applies them."""

    @tf.autograph.experimental.do_not_convert  # otherwise AutoGraph would rewrite it
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, rest = list(args[0] if args else kwargs.pop(parameter)), args[1:]
        job = current()
        watching = None if job is None or job.is_parents else job.part(AppliedGradients)
        reduction = None if watching is None or parameter != "grads" else reduction_inside(self)
        if reduction is not None:
            variables = compat.variables_to_update(self, *rest, **kwargs)
            return reduction.apply(self, functools.partial(original, self), given, variables)
        if watching is None or watching.skips(self):
            return original(self, given, *rest, **kwargs)
        try:
            updated = compat.variables_to_update(self, *rest, **kwargs) if parameter == "grads" else None
            watching.look(self, given if updated is None else list(zip(given, updated)))
        except Exception:  # whoever watches never ends a training
            _log.debug("could not look at the gradients of a %s", type(self).__name__, exc_info=True)
        return original(self, given, *rest, **kwargs)

    return apply


REDUCTION = "_npu_gradient_reduction"
"""The attribute of a wrapped optimizer that holds its ``GradientReduction``."""


def reduction_of(optimizer: Any) -> Any:
    """Return the ``GradientReduction`` of a wrapped optimizer; None for another one."""
    return getattr(optimizer, "__dict__", {}).get(REDUCTION)


def is_wrapped(optimizer: Any) -> bool:
    """Return True when the optimizer, or the one inside a loss-scale optimizer, already reduces its gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return reduction_of(optimizer) is not None or (inner is not None and reduction_of(inner) is not None)


def reduction_inside(optimizer: Any) -> Any:
    """Return the reduction of the optimizer inside a loss-scale optimizer of Keras 3 that isn't wrapped itself; else
    None.

    It calls the one inside only if the gradients are finite, on which all ranks must agree, or some wait forever. Keras
    makes it itself (compile under mixed_float16) without telling the inner one. So its gradients are reduced before it
    looks at them.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return None if inner is None or reduction_of(optimizer) is not None else reduction_of(inner)
