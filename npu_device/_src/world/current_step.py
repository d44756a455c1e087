"""The step of a replicated model that runs, or is being traced, in this thread; for calls in the step itself.

It also tells which gradients the step has reduced itself, with ``npu.distribute.all_reduce``, before it applies them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.agreed_engine import differentiable_move
from npu_device._src.threads import ThreadSwitch
from npu_device._src.world.share import Share

# Kept by thread, since a script may train models in several.
_running = threading.local()


IsSum = dict[str, bool]
"""True for a sum over the samples, False for a mean; what isn't known is left out.

Keys are names of numbers ("metric 2 0", see ``CurrentStep.register_number``) and of optimizers ("optimizer 0").
"""


@dataclass
class Sums:
    """What of a step is a sum over its samples, not a mean, as the first-step check has found."""

    numbers: IsSum = field(default_factory=dict)
    # The reducers of optimizers all of whose gradients are sums.
    reducers: set = field(default_factory=set)
    has_all_reducers: bool = False  # ``reducers`` has the reducers of all optimizers of the step


@dataclass
class CurrentStep:
    """A step as the calls in it see it.

    Each rank multiplies what it has from its samples, and the sum over the ranks is what one process has::

        factor           value                                 what it multiplies
        fraction         samples of this rank / of all ranks   means over samples: logs, moving averages
        sum_factor       1, or 0 without samples               sums over samples: metrics, what ``sums`` has
        gradient_factor  one of these two, see                 the loss of an optimizer (``with_weighted_loss``), or
                         ``WeightedReducer``                   its gradients, but never both
        1 / fraction                                           a sum in a loss that gets the fraction afterwards
    """

    share: Share
    is_custom: bool  # the script has written the step, not Keras
    world: Any  # ranks with which the step exchanges: a ``World``, or virtual ones
    sums: Sums
    # A step of the first-step check: only its graph runs, and its gradients are compared, not applied.
    is_dry_run: bool = False
    # The reducers of optimizers that have multiplied a loss by this rank's factor, so that its gradients needn't be.
    with_weighted_loss: set = field(default_factory=set)
    reduced: list = field(default_factory=list)  # results of what the step has reduced itself
    # On while a metric is updated: what it calls gives values for the metric alone.
    in_metric: ThreadSwitch = field(default_factory=ThreadSwitch)
    # Losses, and what metrics and logs are given, by name.
    numbers: dict[str, Any] = field(default_factory=dict)
    _counts_by_taker: Counter[str] = field(default_factory=Counter)

    # Cached, so that a graph has one tensor, made at the start of a step (``Step.__enter__``).
    @functools.cached_property
    def fraction(self) -> Any:
        """Return this rank's fraction of the samples: its factor in a mean."""
        return self.share.fraction

    @functools.cached_property
    def sum_factor(self) -> Any:
        """Return this rank's factor in a sum: 1 if it has samples, else 0."""
        return self.share.sum_factor

    def register_number(self, taker: str, number: Any) -> bool | None:
        """Note a number; return True if it is a sum over the samples, False if it is a mean, None if that isn't known.

        The name of a number is its ``taker`` (a loss, a metric, the logs) and its place among the numbers that the step
        has given to that taker so far, since the values differ from step to step and the calls don't.
        """
        name = f"{taker} {self._counts_by_taker[taker]}"
        self._counts_by_taker[taker] += 1
        self.numbers[name] = number
        return self.sums.numbers.get(name)

    # The step sums the ranks' gradients, each times the rank's fraction, unless the losses have got that factor. Where
    # ranks exchange values that the loss depends on, gradients come back from all ranks' losses, each with the factor
    # of its rank: they must not be multiplied once more by the factor of this rank.

    def to_exchange(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor that is going to be summed or gathered, with the gradient that this calls for."""
        return self._with_gradient(tensor, tf.math.divide_no_nan)

    def exchanged(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor that has been summed or gathered, with the gradient that this calls for."""
        return self._with_gradient(tensor, tf.multiply)

    def _with_gradient(
        self, tensor: Any, by_fraction: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    ) -> Any:
        is_dense = tf.is_tensor(tensor) and not isinstance(tensor, tf.IndexedSlices)
        if not is_dense or not tensor.dtype.is_floating:
            return tensor

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            if self.with_weighted_loss or self.sums.has_all_reducers:
                return upstream
            return by_fraction(upstream, tf.cast(self.fraction, upstream.dtype))

        return differentiable_move(tf.identity(tensor), backward, tensor)


def current_step() -> CurrentStep | None:
    """Return the step that runs in this thread; None outside one."""
    return getattr(_running, "step", None)


@contextlib.contextmanager
def running(step: CurrentStep | None) -> Iterator[None]:
    outer_step = current_step()
    _running.step = step
    try:
        # What stands in for methods while a step runs belongs to that step.
        with compat.own_traces():
            yield
    finally:
        _running.step = outer_step


def reduced_by_step(gradients: Iterable) -> bool:
    """Return True if gradients depend on this rank's samples only through what the current step has reduced."""
    step = current_step()
    if step is None or not step.reduced:
        return False
    reduced = {id(tensor) for tensor in _tensors(step.reduced)}
    tensors = _tensors(gradients)
    if tf.executing_eagerly():
        # No graph tells what a gradient was made of: then they are the very results of a reduction. A gradient that is
        # reduced once more for lack of that stays as it is, but for rounding: the mean of equal values.
        return all(id(tensor) in reduced for tensor in tensors)
    samples = {id(tensor) for tensor in _tensors(step.share.data)}
    return all(_comes_from(tensor, reduced, samples) for tensor in tensors)


def _tensors(structure: Any) -> list:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


_OUTSIDE_SOURCES = (
    "Random",
    "Stateless",
    "Stateful",
    "Multinomial",
    "PyFunc",
    "EagerPyFunc",
    "Iterator",
    "Placeholder",
)
_READERS = ("ReadVariableOp", "ResourceGather", "VariableShape")


def _comes_from(tensor: Any, reduced: set[int], samples: set[int]) -> bool:
    """Return True if each way back ends in a constant, a variable set to such, or, at least one, a reduced tensor."""
    if not tf.is_symbolic_tensor(tensor):
        return id(tensor) in reduced
    has_reduced = False

    def sources(node: Any) -> list:
        if id(node) in reduced:
            return []
        if node.dtype == tf.resource:
            return [setter.inputs[1] for setter in _setters(node)]
        # The samples may come from outside of the graph only as its inputs.
        return list(node.op.inputs)

    for node in compat.walk([tensor], sources):
        if id(node) in reduced:
            has_reduced = True
        elif id(node) in samples:
            return False
        elif node.dtype == tf.resource:
            if not _is_only_assigned(node):
                return False
        elif node.op.type.startswith(_OUTSIDE_SOURCES):
            return False
    return has_reduced


def _is_only_assigned(handle: tf.Tensor) -> bool:
    """Return whether the graph shows all that a variable is set to, by its handle there."""
    outer = getattr(handle.graph, "outer_graph", None)
    if outer is not None and outer.building_function:
        # In a branch or a loop, what is outside may set the variable.
        return False
    # A value from before the graph runs doesn't come from the samples of this step.
    return all(setter.type.startswith("Assign") for setter in _setters(handle))


def _setters(handle: tf.Tensor) -> list[tf.Operation]:
    return [user for user in handle.consumers() if not user.type.startswith(_READERS)]
