"""Were the gradients that an optimizer applies reduced? While a job is open, a wrapper on the methods through which
every Keras optimizer applies gradients asks that.

In a function, the graph tells. In eager mode a gradient may be the very result of a reduction. Where clipping or
scaling hides that, or a function got the gradients as arguments, the ranks post a few sums of their gradients in the
steps of the schedule, and whoever finds them all looks: gradients that are equal on two ranks were reduced, or
computed from the same data. No rank waits for another, and what is found is a warning, which never ends a training.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.job import Job, current
from npu_device._src.gradients.reduced import ReducedTensors, dense_of
from npu_device._src.training import keras_hooks
from npu_device._src.training.audits_by_hand import AuditsByHand
from npu_device._src.training.last_word import LastWord
from npu_device._src.training.same_samples import Pair, SameSamples
from npu_device._src.training.schedule import FIRST_LOOKS, NEVER, Schedule, can_compare, next_look

_log = logging.getLogger("npu_device")

_KEPT = 32  # optimizers of a signature, and signatures
_SUMMED = 16  # gradients, the smallest ones
_ROUNDING = 1e-3  # of the sum of a gradient's absolute values: hosts with other processors round differently
_LAST_LOOK = 1000  # steps, when ranks that have posted nothing are not waited for any more

_HEAD = (
    "the ranks apply gradients that were not reduced: the optimizer %s has made %d steps, and each of the %d ranks "
    "trains a model of its own.\n"
)
_DISCARDED = (
    "Likely cause: the result of all_reduce isn't used. It returns the reduced gradients, and leaves its arguments as "
    "they are.\nWhat to do: gradients = npu.distribute.all_reduce(gradients), and apply those."
)
_NOT_REDUCED = (
    "Likely cause: the optimizer isn't wrapped, or another model than the replicated one is trained, such as one "
    "loaded or cloned later; a loss that is reduced for printing reduces no gradient.\nWhat to do: call model = "
    "npu.distribute.replicate(model) before fit, for each model; or in the training loop gradients = "
    "npu.distribute.all_reduce(gradients) before they are applied."
)

_Sums = list[list[float]]  # for each gradient its sum, and that of its absolute values


class _Watched:
    """What is known of one optimizer."""

    def __init__(self, job: Job, kind: str, variables: Sequence[Any]) -> None:
        self.kind = kind
        numbers = sum(int(np.prod(tuple(variable.shape))) for variable in variables)
        self.signature = f"{len(variables)} variables, {numbers} numbers"  # the same on every rank
        self.trained = {id(compat.inner_variable(variable)) for variable in variables}
        self.schedule = Schedule(job.device("CPU"), FIRST_LOOKS[0])
        self.samples = SameSamples(job)
        self.is_reduced: bool | None = None  # what it applies; None as long as that isn't known
        self.posted: dict[str, _Sums] = {}  # by step


class AppliedGradients:
    """The optimizers that apply gradients in a job, and the wrapper on their classes; a part of the job.

    Args:
        job: the job.
        last_word: the job's.
    """

    def __init__(self, job: Job, last_word: LastWord) -> None:
        self._job = job
        self._last_word = last_word
        self._posts: dict[str, list[dict[str, _Sums]]] = {}  # by signature
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._replaced: list[tuple[type, str, Any, Any]] = []
        self._pair: Pair | None = None
        self._missing = {"keras", "tf_keras"}
        self.find_keras()

    def find_keras(self) -> None:
        """Wrap the methods of each Keras that has been imported since the last call."""
        if not any(name in sys.modules for name in self._missing):  # at each call: there are thousands of modules
            return
        done = {(kind, name) for kind, name, _, _ in self._replaced}
        for kind, name in compat.optimizer_methods():
            if (kind, name) not in done:
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

    def note_pair(self, pair: Pair | None) -> None:
        """Note a gradient of an eager loop before and after its reduction, until it is applied."""
        self._pair = pair or self._pair

    def note_variables(self, values: Sequence[Any]) -> None:
        """Note that variables themselves are reduced, as in local SGD; gradients for them then needn't be."""
        reduced = {id(compat.inner_variable(value)) for value in values if hasattr(value, "assign")}
        for watched in self._watched.values() if reduced else ():
            if reduced & watched.trained:
                watched.is_reduced = True

    def look(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Look at what an optimizer is about to apply, if it is time."""
        if not can_compare() or hasattr(optimizer, "inner_optimizer") or _has_replicas() or compat.compiled_by_xla():
            return
        pairs = [(one, other) for one, other in zip(gradients, variables) if tf.is_tensor(dense_of(one))]
        if not pairs:
            return
        watched = self._watched.get(optimizer)
        if watched is None:
            watched = _Watched(self._job, type(optimizer).__name__, variables)
            self._watched[optimizer] = watched
            if tf.executing_eagerly() and self._job.made(ReducedTensors).lead_to([one for one, _ in pairs]):
                self._know_as_reduced(watched, optimizer, variables)
        if keras_hooks.reduction_of(optimizer) is not None:
            self._know_as_reduced(watched, optimizer, variables)
            return
        present = [one for one, _ in pairs]
        if tf.executing_eagerly():
            watched.schedule.step(lambda count: self._look_now(watched, int(count), present, optimizer, variables))
            self._pair = None
            self._job.made(ReducedTensors).begin_step()
            return
        leads = self._job.made(ReducedTensors).lead_to(present)
        if leads:
            self._know_as_reduced(watched, optimizer, variables)
            return
        if leads is False:
            self._job.made(AuditsByHand).are_not_reduced([variable for _, variable in pairs])
        cause = self._cause(present)

        def post(count: Any, *arrays: np.ndarray) -> list[Any]:
            return [np.int64(self._post(watched, int(count), list(map(_sums_of, arrays)), cause))]

        def look(count: Any) -> Any:
            return call_now(post, [count, *_smallest(present)], [tf.TensorSpec([], tf.int64)])[0]

        watched.schedule.step(look)

    def _know_as_reduced(self, watched: _Watched, optimizer: Any, variables: Sequence[Any]) -> None:
        if watched.is_reduced is None:
            watched.is_reduced = True
            self._last_word.add_optimizer(optimizer, variables)

    def _look_now(
        self, watched: _Watched, count: int, gradients: Sequence[Any], optimizer: Any, variables: Sequence[Any]
    ) -> int:
        """Look at a step of an eager loop; return the step of the next look."""
        reduced = self._job.made(ReducedTensors)
        if reduced.lead_to(gradients):
            self._know_as_reduced(watched, optimizer, variables)
        if self._pair is not None and reduced.have_shapes_of(gradients):
            mine, result, scale = self._pair
            watched.samples.compare(count, compat.to_array(mine), compat.to_array(result), scale)
        if watched.is_reduced is None:
            sums = [_sums_of(compat.to_array(tensor)) for tensor in _smallest(gradients)]
            return self._post(watched, count, sums, self._cause(gradients))
        return NEVER if count >= FIRST_LOOKS[-1] else next_look(count, 0)

    def _cause(self, gradients: Sequence[Any]) -> str:
        return _DISCARDED if self._job.made(ReducedTensors).have_shapes_of(gradients) else _NOT_REDUCED

    def _post(self, watched: _Watched, count: int, sums: _Sums, cause: str) -> int:
        """Post sums of this rank's gradients, and look at what all ranks have posted in an earlier step; return the
        step of the next look.
        """
        if watched.is_reduced is not None or self._job.health.is_over:
            return NEVER
        earlier, cluster = list(watched.posted), self._job.cluster
        if len(earlier) < len(FIRST_LOOKS) and np.any(sums) and np.all(np.isfinite(sums)):
            watched.posted[str(count)] = sums
        try:
            posted = self._job.store.post(f"gradients of {watched.signature}", self._posts_with(watched))
            for step in earlier:  # if these were reduced, the other ranks have posted theirs by now
                own = _own({rank: [one[step] for one in each if step in one] for rank, each in posted.items()})
                if len(own) < cluster.world_size:
                    break
                watched.is_reduced = watched.posted[step] not in own[cluster.rank] or None
                if watched.is_reduced is None and all(own.values()):
                    watched.is_reduced = False
                    models = min(map(len, own.values()))
                    self._job.store.set(f"told about {models} models of {watched.signature}", "")
                    _log.warning(_HEAD + cause, watched.kind, count, cluster.world_size)
                if watched.is_reduced is not None:
                    return NEVER
        except (ClusterError, KeyError):  # the next collective tells; or another rank has told
            return NEVER
        return NEVER if count >= _LAST_LOOK else next_look(count, count)

    def _posts_with(self, watched: _Watched) -> list[dict[str, _Sums]]:
        """Return what this rank has posted of the optimizers of a signature, the last one among them.

        Earlier ones stay, also after the optimizer's end: another rank may be behind by an optimizer.
        """
        posts = self._posts.setdefault(watched.signature, [])
        if all(one is not watched.posted for one in posts):
            posts.append(watched.posted)
        del posts[:-_KEPT]
        while len(self._posts) > _KEPT:
            del self._posts[next(iter(self._posts))]
        return posts


def _own(rows: dict[int, list[_Sums]]) -> dict[int, list[_Sums]]:
    """Return, for each rank, the sums that no other rank has."""
    return {
        rank: [
            one
            for one in mine
            if not any(_are_alike(one, each) for other, others in rows.items() if other != rank for each in others)
        ]
        for rank, mine in rows.items()
    }


def _are_alike(one: _Sums, other: _Sums) -> bool:
    first, second = np.array(one), np.array(other)
    if first.shape != second.shape:
        return False
    largest = np.maximum(first[:, 1:], second[:, 1:])
    return bool(np.all(np.abs(first - second) <= _ROUNDING * largest))


def _sums_of(array: np.ndarray) -> list[float]:
    values = array.astype(np.float64)
    return [float(values.sum()), float(np.abs(values).sum())]


def _smallest(gradients: Sequence[Any]) -> list[Any]:
    """Return the tensors of the smallest gradients with floating-point numbers."""
    tensors = [dense_of(gradient) for gradient in gradients]
    known = [tensor for tensor in tensors if tensor.dtype.is_floating]
    return sorted(known, key=lambda tensor: tensor.shape.num_elements() or sys.maxsize)[:_SUMMED]


def _has_replicas() -> bool:
    return bool(tf.distribute.get_strategy().num_replicas_in_sync > 1)


def _hook(original: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    """Return a method that looks at its gradients before the original applies them."""

    @tf.autograph.experimental.do_not_convert  # otherwise AutoGraph would rewrite it
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, rest = list(args[0] if args else kwargs.pop(parameter)), args[1:]
        job = current()
        watching = None if job is None or job.is_parents else job.part(AppliedGradients)
        if watching is None:
            return original(self, given, *rest, **kwargs)
        if parameter == "grads":
            gradients, variables = given, compat.variables_to_update(self, *rest, **kwargs)
            reduction = keras_hooks.reduction_inside(self)
            if reduction is not None:
                return keras_hooks.apply_reduced(self, reduction, functools.partial(original, self), given, variables)
        else:
            gradients, variables = [one for one, _ in given], [variable for _, variable in given]
        try:
            watching.look(self, gradients, variables)
        except Exception:  # whoever watches never ends a training
            _log.debug("could not look at the gradients of a %s", type(self).__name__, exc_info=True)
        return original(self, given, *rest, **kwargs)

    return apply
