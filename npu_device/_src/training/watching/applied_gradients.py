"""While a job is open, each Keras optimizer that applies gradients is asked: were they reduced?

In a function, the graph tells. In eager mode a gradient may be the very result of a reduction. Where clipping or
scaling hides that, or a function got the gradients as arguments, the ranks post a few sums of their gradients in the
steps of the schedule (``posted_sums``). If XLA compiles the step, how its variables have changed is posted instead: of
a ``fit`` by the graph around it, of the script's own loop when something is reduced, such as its loss.
``optimizer_hook`` calls this.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.graph import call_now, origin
from npu_device._src.collectives.job import Job
from npu_device._src.gradients.reduction import dense_of, unreduced_among
from npu_device._src.training.watching.digests import (
    BROADCAST,
    checksum,
    different_start,
    variable_name,
)
from npu_device._src.training.watching.last_word import LastWord
from npu_device._src.training.watching.posted_sums import PostedSums
from npu_device._src.training.watching.same_samples import Pair
from npu_device._src.training.watching.schedule import NEVER, can_compare, next_look
from npu_device._src.training.watching.watched_optimizer import (
    WatchedOptimizer,
    arrays_of,
    smallest,
)
from npu_device._src.training.watching.wrapped_optimizers import reducer_of

# The most optimizers whose variables before the first step are compared.
_MOST_STARTS = 32


@dataclass
class _OptimizerCall:
    """One call of an optimizer."""

    gradients: list  # gradients that aren't None
    targets: list  # the variable of each
    variables: list  # all of the call
    graph: Any = None  # the graph around the step, if XLA compiles it


class UnequalStartError(RuntimeError):
    """The ranks begin with different variables, and the user has asked for an error."""


class AppliedGradients:
    """The optimizers that apply gradients in a job; a component of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last_word = job.component_or_new(LastWord, job)
        self._posted_sums = PostedSums(job, self._last_word, self._are_equal_otherwise)
        self._watched = weakref.WeakKeyDictionary[Any, WatchedOptimizer]()
        # The optimizers of the script's own loops that XLA compiles, by graph.
        self._compiled = weakref.WeakKeyDictionary[Any, WatchedOptimizer]()
        self._pair: Pair | None = None
        self._reduced_count = 0  # number of tensors reduced since the last eager step
        self._start_counts = Counter[str]()  # by signature
        self._averaged = set[int]()  # the ids of variables that are reduced themselves

    # What the script reduces

    def note_reduced(self, values: Sequence, pair: Callable[[], Pair | None] | None) -> None:
        """Note what is reduced by hand: in eager mode gradients, of which ``pair`` returns one before and after its
        reduction among all ranks; or variables, as in local SGD, whose gradients then needn't be.
        """
        if tf.executing_eagerly() and pair is not None:
            self._reduced_count += len(values)
            if any(watched.schedule.is_due() for watched in self._watched.values()):
                self._pair = pair() or self._pair
            for watched in self._compiled.values():
                self._observe_compiled(watched)
        variables = (value for value in values if hasattr(value, "assign"))
        self._averaged.update(id(compat.inner_variable(variable)) for variable in variables)
        for watched in self._watched.values():
            is_undecided = watched.is_reduced is None
            if is_undecided and (watched.posted or not tf.executing_eagerly()):
                # An error of the watch itself must not end a training run.
                with contextlib.suppress(Exception):
                    for variable in watched.living():
                        if _is_value_of(variable, values):
                            self._averaged.add(id(compat.inner_variable(variable)))

    def leaves_unreduced(self, variable: Any) -> bool:
        """Return whether an optimizer has applied gradients to a variable that aren't known to be reduced."""
        key = id(compat.inner_variable(variable))
        optimizers = self._watched.values()
        return any(key in watched.trained and not watched.is_reduced for watched in optimizers)

    # What an optimizer applies

    def skips(self, optimizer: Any) -> bool:
        """Return True for an eager step in which nothing is to be looked at, which is counted here."""
        # In all but a few steps, this is all that watching costs.
        watched = self._watched.get(optimizer)
        if watched is None or not tf.executing_eagerly() or watched.schedule.is_due():
            return False
        if watched.start is not None and watched.is_reduced:
            return False
        self._pair = None
        self._reduced_count = 0
        watched.schedule.step(lambda count: NEVER)
        return True

    def observe(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Look at the gradients that an optimizer is about to apply to variables, if it is time."""
        step = self._step_of(optimizer, pairs)
        if step is None:
            return
        is_new = optimizer not in self._watched
        if is_new:
            self._watched[optimizer] = WatchedOptimizer(self._job, optimizer, step.variables)
        watched = self._watched[optimizer]
        is_wrapped = reducer_of(optimizer) is not None
        unreduced = []
        if not is_wrapped:
            unreduced = unreduced_among(step.gradients)
        if not (unreduced or watched.is_reduced):
            watched.is_reduced = True
            self._last_word.add_optimizer(optimizer, step.variables)
        # In eager mode, a gradient that is no result of a reduction may still have been reduced.
        if is_wrapped or not (unreduced or tf.executing_eagerly()):
            return
        if step.graph is not None and is_new:
            # Read outside of the graph that XLA compiles, where values can be read.
            with tf.init_scope():
                watched.values_before = arrays_of(step.variables)
        reduces_all = self._reduced_count >= len(step.gradients)
        self._reduced_count = 0
        if is_new:
            self._note_start(watched, step)
        with _outside_xla(step.graph):
            watched.schedule.step(self._comparing(watched, step, unreduced))
        if reduces_all and not is_new:
            self._compare_start(watched, step)

    def _step_of(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> _OptimizerCall | None:
        """Return the step that an optimizer is about to make, unless it can't be looked at in this call."""
        gradients = []
        targets = []
        for gradient, variable in pairs:
            if tf.is_tensor(dense_of(gradient)):
                gradients.append(gradient)
                targets.append(variable)
        # Within a strategy of TensorFlow, one rank has several values of a variable.
        has_replicas = tf.distribute.get_strategy().num_replicas_in_sync != 1
        # The inner optimizer of a loss-scale optimizer is observed by itself.
        has_inner = hasattr(optimizer, "inner_optimizer")
        if not gradients or not can_compare() or has_replicas or has_inner:
            return None
        step = _OptimizerCall(gradients, targets, [variable for _, variable in pairs])
        if not compat.compiled_by_xla():
            return step
        # XLA can't call what compares: the graph around it does, by the variables.
        self._last_word.add_if_equal(step.variables)
        step.graph = compat.graph_around_xla()
        if step.graph is not None:
            return step
        if reducer_of(optimizer) is None and optimizer not in self._compiled:
            self._compiled[optimizer] = WatchedOptimizer(
                self._job, optimizer, step.variables, first_look=1
            )
        return None

    def _comparing(
        self, watched: WatchedOptimizer, step: _OptimizerCall, unreduced: Sequence
    ) -> Callable[[Any], Any]:
        """Return a function that compares the step of a number, and returns the number of the next step to compare."""
        is_eager = tf.executing_eagerly()
        pair = self._pop_pair(step)
        variables = []
        # Only some are unreduced: the others were reduced.
        if len(unreduced) < len(step.gradients):
            ids = set(map(id, unreduced))
            for gradient, target in zip(step.gradients, step.targets):
                if id(gradient) in ids:
                    variables.append((id(compat.inner_variable(target)), variable_name(target)))

        def compare(count: Any, *arrays: np.ndarray) -> list:
            due = self._posted_sums.compare(watched, int(count), arrays, variables)
            if is_eager:
                # The first steps of an eager loop are always compared, since that also shows
                # whether ranks have the same samples.
                due = min(due, next_look(int(count), NEVER))
            return [np.int64(due)]

        def compare_step(count: Any) -> Any:
            if pair is not None:
                gradient = compat.to_array(pair.gradient)
                reduced = compat.to_array(pair.reduced)
                watched.samples.compare(count, gradient, reduced, pair.scale)
            tensors = unreduced
            # In the graph around a compiled step, only the variables can be read.
            if step.graph is not None:
                tensors = list(map(tf.convert_to_tensor, step.variables))
            inputs = [count, *smallest(tensors)]
            [next_count] = call_now(compare, inputs, [tf.TensorSpec([], tf.int64)])
            return next_count

        return compare_step

    def _pop_pair(self, step: _OptimizerCall) -> Optional[Pair]:
        """Return a gradient of an eager step before and after its reduction, if one was noted."""
        pair = self._pair
        self._pair = None
        shapes = [dense_of(gradient).shape for gradient in step.gradients]
        # The pair may be from the gradients of another optimizer.
        if pair is None or not tf.executing_eagerly() or pair.gradient.shape not in shapes:
            return None
        return pair

    # The start of eager loops: in functions ``same_variables`` compares it, while they are traced.

    def _note_start(self, watched: WatchedOptimizer, step: _OptimizerCall) -> None:
        if not tf.executing_eagerly() or environment.NPU_DEVICE_UNEQUAL_START.get() == "ignore":
            return
        self._start_counts[watched.signature] += 1
        name = f"start {self._start_counts[watched.signature]} of {watched.signature}"
        # A script that makes optimizers without end must not fill the store.
        if sum(self._start_counts.values()) <= _MOST_STARTS:
            watched.start = name, list(map(checksum, step.variables))

    def _compare_start(self, watched: WatchedOptimizer, step: _OptimizerCall) -> None:
        """Compare the start once the loop is known to reduce: what is equal by now was broadcast after the first step,
        as Horovod's scripts do.
        """
        if watched.start is None or not watched.is_reduced:
            return
        name, start = watched.start
        watched.start = None
        names = list(map(variable_name, step.variables))
        checksums = list(map(checksum, step.variables))
        error = different_start(self._job, name, names, BROADCAST, start, checksums)
        # Told on one rank: an error there ends the others, too.
        if error:
            raise UnequalStartError(error)

    # Steps that XLA compiles, in the script's own loops

    def _observe_compiled(self, watched: WatchedOptimizer) -> None:
        """Count what is reduced beside a step that XLA compiles, and look at its variables if it is time."""

        def compare_variables(count: int) -> int:
            if watched.values_before:
                return self._posted_sums.compare(watched, int(count), arrays_of(watched.living()))
            # The values after the first step are the first ones: until then a script may broadcast.
            watched.values_before = arrays_of(watched.living())
            return next_look(int(count), NEVER)

        # An error of the watch itself must not end a training run.
        with contextlib.suppress(Exception):
            watched.schedule.step(compare_variables)

    def _are_equal_otherwise(self, watched: WatchedOptimizer) -> bool:
        """Return whether what an optimizer trains is reduced itself, or by another optimizer, as in local SGD."""
        reduced = [self._averaged]
        for optimizer in self._watched.values():
            if optimizer.is_reduced:
                reduced.append(optimizer.trained)
        return any(not watched.trained.isdisjoint(variables) for variables in reduced)


@contextlib.contextmanager
def _outside_xla(graph: Any) -> Iterator[None]:
    """Build in the graph around a call that XLA compiles, if there is one."""
    if graph is None:
        yield
        return
    # Control dependencies of the compiled function mean nothing in the graph around it.
    with graph.as_default(), tf.control_dependencies(None):
        yield


def _is_value_of(variable: Any, values: Sequence) -> bool:
    """Return whether the value of a variable is among some values."""
    candidates = []
    for tensor in values:
        if isinstance(tensor, tf.Tensor) and tensor.shape == variable.shape:
            candidates.append(tensor)
    if tf.executing_eagerly() and candidates:
        array = compat.to_array(tf.convert_to_tensor(variable))
        # Zeros prove nothing, since they are the value of many variables.
        arrays = map(compat.to_array, candidates)
        return bool(array.any()) and any(np.array_equal(candidate, array) for candidate in arrays)
    inner = compat.inner_variable(variable)
    handles = {handle.name for read, handle in compat.variables_read() if read is inner}
    readers = [origin(tensor).op for tensor in candidates]
    return any(
        reader.type == "ReadVariableOp" and reader.inputs[0].name in handles for reader in readers
    )
