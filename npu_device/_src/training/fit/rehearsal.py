"""Runs a model's train step on a few samples without training: it hands back gradients, and undoes what it changes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.fit.step import LOGS, Replaced, Step
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.weighting import WeightedReduction, note_numbers
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.wrapped_optimizers import reduction_of
from npu_device._src.world.current_step import CurrentStep, current_step
from npu_device._src.world.share import Share

_as_it_is = tf.autograph.experimental.do_not_convert


class NotChecked(Exception):
    """The check can't run the step; the text says why."""


@dataclass(frozen=True)
class Part(Share):
    """A run of a batch's units as the share of a rank; or all of them, as one process has them."""

    units: int
    is_first: bool


@dataclass(frozen=True)
class Outcome:
    gradients: list[
        Any
    ]  # that reached the optimizers, weighted; None, or values and indices for rows of a table
    losses: list[Any]  # that layers have added
    state: list[np.ndarray]  # of the variables that the step has changed
    numbers: dict[
        str, float
    ]  # losses, and what metrics and logs are given; see ``CurrentStep.is_sum``
    chosen: list[np.ndarray]  # tensors that were asked for


class Rehearsal:
    """A train step, traced once, that runs on parts of a batch."""

    def __init__(
        self, context: StepContext, spec: Any, choose: Callable[[Any], list[Any]] | None = None
    ) -> None:
        """Trace the step of a built model; ``choose`` returns tensors of the graph whose values are wanted, too."""
        self._context = context
        self._choose = choose
        self.variables: list[Any] = []  # whose gradients the optimizers got
        self.gradients: list[Any] = []  # that the optimizers got
        self.reductions: list[Any] = []  # by which the optimizers reduce those; None without one
        self.losses: list[Any] = []  # that layers have added
        self.numbers: dict[str, Any] = {}
        self.chosen: list[Any] = []
        self.step: CurrentStep
        self._weighted: list[Any] = []
        self._world: _VirtualRanks
        self._on_stage = contextlib.ExitStack()
        with self._on_stage, _functions_inline():
            self._function = self._traced(context.own_step, spec)
        self.graph = self._function.graph
        remains = compat.what_remains(self.graph)
        if remains is not None:
            raise NotChecked(f"the step {remains[0]}{_at(remains[1])}")
        self.handles, other = compat.changed_by(self.graph)
        if other is not None:
            raise NotChecked(f"the step changes what can't be restored ({other.type}){_at(other)}")

    def _traced(self, own: Callable[[Any], Any], spec: Any) -> Any:
        def step(data: Any, units: Any, total: Any, is_first: Any) -> Any:
            share = self._begin(data, units, total, is_first)
            self._note_logs(own(share.data))
            return self._results()

        number, flag = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)
        autograph = not compat.is_keras_3(
            compat.keras_of(self._context.model)
        )  # as each Keras traces the step itself
        return tf.function(step, autograph=autograph).get_concrete_function(
            spec, number, number, flag
        )

    @_as_it_is
    def _begin(self, data: Any, units: Any, total: Any, is_first: Any) -> Share:
        replaced = Replaced()
        self._on_stage.callback(replaced.restore)
        self._world = _VirtualRanks(tf.compat.v1.get_default_graph(), is_first)
        for layer in self._context.parts.layers:
            if _differs_in_noise_only(layer):
                replaced.replace(layer, "call", _call_as_in_inference)
        for optimizer in training_state.optimizers(self._context.model):
            self._record(optimizer, replaced)
        share = Share(data, units, total)
        # Metrics count what they like, and random numbers are those of any rank.
        of = self._context
        virtual = StepContext(self._world, of.model, "check", of.own_step, of.sums, of.checksum)
        virtual.known_parts = replace(self._context.parts, metrics=[], trackers=[], statistics=[])
        self._on_stage.enter_context(Step(virtual, share))
        step = current_step()
        assert step is not None
        step.is_rehearsal = True
        self.step = step
        note_numbers(step, self._context.parts.metrics, replaced)
        return share

    @_as_it_is
    def _note_logs(self, logs: Any) -> None:
        for value in tf.nest.flatten(logs):
            self.step.is_sum(LOGS, value)

    def _record(self, optimizer: Any, replaced: Replaced) -> None:
        carriers = [optimizer, getattr(optimizer, "inner_optimizer", None)]
        reductions = [reduction_of(each) for each in carriers if each is not None]
        reduction = next((each for each in reductions if isinstance(each, WeightedReduction)), None)

        def take(gradients: Any, variables: Any) -> Any:
            gradients, variables = list(gradients), list(variables)
            weighted = gradients
            if reduction is not None:
                weighted = reduction.part_of(gradients, self.step, optimizer)
            for variable, gradient, part in zip(variables, gradients, weighted):
                if gradient is not None:
                    self.variables.append(variable)
                    self.gradients.append(gradient)
                    self.reductions.append(reduction)
                    self._weighted.append(part)
            return optimizer.iterations

        def apply(own: Any, grads: Any, trainable_variables: Any = None) -> Any:
            del own
            return take(grads, compat.variables_to_update(optimizer, trainable_variables))

        def apply_gradients(own: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            del own, args, kwargs
            pairs = list(grads_and_vars)
            return take([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

        for each in carriers:
            if each is not None:
                replaced.replace(each, "apply_gradients", apply_gradients)
                if hasattr(each, "apply"):
                    replaced.replace(each, "apply", apply)

    @_as_it_is
    def _results(self) -> Any:
        graph = self._world.graph
        flat = tf.nest.flatten(self._weighted, expand_composites=True)
        if not all(compat.is_in(graph, tensor) for tensor in flat):
            raise NotChecked("the step applies gradients in a branch or a loop")
        added = []
        with contextlib.suppress(
            AttributeError, ValueError
        ):  # a model that its step has never called
            added = [loss for loss in self._context.model.losses if compat.is_in(graph, loss)]
        self.losses += added
        self.chosen = [] if self._choose is None else self._choose(graph)
        gradients = [
            (part.values, part.indices) if isinstance(part, tf.IndexedSlices) else part
            for part in self._weighted
        ]
        losses = [tf.reduce_sum(loss) for loss in added]
        given = {
            name: tf.convert_to_tensor(each)
            for name, each in self.step.numbers.items()
            if _is_number(each)
        }
        self.numbers = {
            name: number for name, number in given.items() if compat.is_in(graph, number)
        }
        compat.without_noise(graph)
        return gradients, losses, self._world.sent, self.numbers, self.chosen

    def values(self) -> list[np.ndarray]:
        return [compat.value_of_handle(handle).numpy() for handle in self.handles]

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """Run the step on all parts of a batch, as ranks that exchange what it exchanges."""
        self._world.forget()
        for _ in range(len(self._world.sent) + 2):
            found = [self._run(part) for part in parts]
            if len(parts) == 1 or self._world.deliver([sent for _, sent in found]):
                return [outcome for outcome, _ in found]
        raise NotChecked("what the ranks exchange in the step doesn't settle")

    def _run(self, part: Part) -> tuple[Outcome, list[Any]]:
        before = [compat.value_of_handle(handle) for handle in self.handles]
        numbers = [tf.constant(value) for value in (part.units, part.total, part.is_first)]
        try:
            gradients, losses, sent, numbers, chosen = self._function(part.data, *numbers)
            state = self.values()
        finally:
            for handle, value in zip(self.handles, before):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        gradients, losses, chosen = tf.nest.map_structure(
            lambda tensor: tensor.numpy(), (gradients, losses, chosen)
        )
        values = {name: float(number) for name, number in numbers.items()}
        return Outcome(gradients, losses, state, values, chosen), sent


def _is_number(value: Any) -> bool:
    if not tf.is_tensor(value) or isinstance(
        value, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
    ):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return value.shape.rank == 0 and (value.dtype.is_floating or value.dtype.is_integer)


@contextlib.contextmanager
def _functions_inline() -> Iterator[None]:
    """Trace tf.functions into their caller's graph, or they would keep what they do here, without noise, for later."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _differs_in_noise_only(layer: Any) -> bool:
    """Return True for a layer of Keras's own that draws random numbers or normalises a batch when it trains."""
    if hasattr(layer, "train_step"):
        return False
    parts = compat.all_layers(layer)
    is_from_keras = all(compat.belongs_to_keras(type(part).call) for part in parts)
    return is_from_keras and "training" in inspect.signature(type(layer).call).parameters


def _call_as_in_inference(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(own).bind(*args, **kwargs)
    bound.arguments["training"] = False
    return own(*bound.args, **bound.kwargs)


def _at(operation: Any) -> str:
    line = where(operation)
    return f" ({line})" if line else ""


# Ranks that exist only in the trace. A step is traced once, as one rank. It runs for one part after the other, so that
# none of them knows what the others send. So it runs several times: each time the exchanges have the results of what
# was sent the last time, until they no longer change.


@dataclass
class _Exchange:
    sent: tf.Tensor
    joins: bool
    result: Any
    is_known: Any


class _VirtualRanks:
    """Stands in for a ``World`` in a trace; ``is_first`` is a tensor, True for the part with the first samples."""

    rank, size, is_main = 0, 2, True

    def __init__(self, graph: Any, is_first: tf.Tensor) -> None:
        self.graph = graph
        self.is_first = is_first
        self._exchanges: list[_Exchange] = []

    def add_up(self, tensor: tf.Tensor) -> tf.Tensor:
        total = self._exchange(tensor, joins=False)
        if not tensor.dtype.is_floating:
            return total
        return differentiable([total], lambda upstream: [self.add_up(upstream)], [tensor])[0]

    def gather(self, tensor: tf.Tensor, purpose: str = "") -> tf.Tensor:
        del purpose
        everything = self._exchange(tensor, joins=True)
        if not tensor.dtype.is_floating:
            return everything

        def backward(upstream: tf.Tensor) -> list[tf.Tensor]:
            rows = tf.shape(tensor)[0]
            begin = tf.where(self.is_first, 0, tf.shape(everything)[0] - rows)
            return [self.add_up(upstream)[begin : begin + rows]]

        return differentiable([everything], backward, [tensor])[0]

    def reduce(self, tensors: Sequence[Any], options: ReductionOptions) -> list[Any]:
        if options.reduction != "sum":
            raise NotChecked(f"the step reduces by {options.reduction!r} itself")
        return [
            None if each is None else self.add_up(tf.convert_to_tensor(each)) for each in tensors
        ]

    def _exchange(self, tensor: tf.Tensor, joins: bool) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        if not compat.is_in(self.graph, tensor):
            raise NotChecked("the ranks exchange values in a branch or a loop of the step")
        with tf.init_scope():
            result = compat.plain_variable(
                np.zeros([0], tensor.dtype.as_numpy_dtype), shape=tf.TensorShape(None)
            )
            is_known = compat.plain_variable(False)
        self._exchanges.append(_Exchange(tensor, joins, result, is_known))
        value = tf.cond(
            tf.identity(is_known), lambda: tf.identity(result), lambda: tf.identity(tensor)
        )
        value.set_shape([None, *tensor.shape[1:]] if joins else tensor.shape)
        return tf.stop_gradient(value)

    @property
    def sent(self) -> list[tf.Tensor]:
        return [exchange.sent for exchange in self._exchanges]

    def forget(self) -> None:
        """Let each part get what it has sent itself, as if it were alone."""
        for exchange in self._exchanges:
            exchange.is_known.assign(False)

    def deliver(self, sent: Sequence[Sequence[Any]]) -> bool:
        """Set the exchanges' results to those of what all parts have sent; return True if nothing has changed."""
        settled = True
        for place, exchange in enumerate(self._exchanges):
            parts = [np.asarray(part[place]) for part in sent]
            if not exchange.joins and len({part.shape for part in parts}) > 1:
                settled = False  # for lack of what they exchange before
                continue
            value = np.concatenate(parts) if exchange.joins else sum(parts[1:], parts[0])
            if not (bool(exchange.is_known) and np.array_equal(exchange.result.numpy(), value)):
                settled = False
                exchange.result.assign(value)
                exchange.is_known.assign(True)
        return settled
