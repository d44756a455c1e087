"""Runs a model's train step on a few samples without training: it hands back gradients, and undoes what it changes."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.fit.logs import LOGS
from npu_device._src.training.fit.metrics import METRIC, note_numbers
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.step import Step
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.weighting import WeightedReducer
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.wrapped_optimizers import reducer_of
from npu_device._src.world.current_step import CurrentStep, current_step
from npu_device._src.world.share import Share


class NotChecked(Exception):
    """The check can't run the step; the text says why."""


@dataclass(frozen=True)
class Part(Share):
    """A run of a batch's units as the share of a rank; or all of them, as one process has them."""

    units: int
    is_first: bool


@dataclass(frozen=True)
class StepResults:
    """What a step gives for a part of a batch."""

    state: list[np.ndarray]  # values of the variables that the step has changed
    # The gradients that reached the optimizers, weighted; a pair of values and indices for rows of a table.
    gradients: list
    losses: list  # losses that layers have added
    # By name, the losses, and the numbers that metrics and logs are given; see ``CurrentStep.register_number``.
    numbers: dict[str, Any]
    chosen_arrays: list[np.ndarray]  # values of the tensors that ``choose`` returned


class DryStep:
    """A train step, traced once, that runs on parts of a batch and leaves nothing behind."""

    def __init__(
        self, context: StepContext, spec: Any, choose: Callable[[Any], list] = lambda graph: []
    ) -> None:
        """Trace the step of a built model; ``choose`` returns tensors of the graph whose values are wanted, too."""
        self._context = context
        self._choose = choose
        self.variables: list = []  # variables whose gradients the optimizers got
        self.gradients: list = []  # gradients that the optimizers got
        # For each gradient, the reducer of its optimizer; None if it has none.
        self.reducers: list = []
        self.losses: list = []  # losses that layers have added
        self.numbers: dict[str, Any] = {}
        self.logs: Any = None  # what the step returned
        self._metric_results: list = []
        self.chosen_tensors: list = []
        self.step: CurrentStep
        self._weighted: list = []
        self._world: _VirtualRanks
        # Replaced methods are given back when the trace has ended, not when ``_begin`` returns.
        self._while_tracing = Replaced()

        def step(batch: Any, units: Any, total: Any, is_first: Any) -> Any:
            self._begin(Share(batch, units, total), is_first)
            return self._returned_tensors(context.own_step(batch))

        # AutoGraph is on where Keras itself traces the step with it.
        function = tf.function(step, autograph=not compat.of_keras_3(context.model))
        count = tf.TensorSpec([], tf.int32)
        flag = tf.TensorSpec([], tf.bool)
        # What functions of the script do is looked at, too, and they would keep it, without noise, for later.
        with self._while_tracing, compat.expanded_functions():
            self._function = function.get_concrete_function(spec, count, count, flag)
        self.graph = self._function.graph
        # What can't be undone must be known before the step first runs.
        effect = compat.what_remains(self.graph)
        if effect is not None:
            text, operation = effect
            line = where(operation)
            location = f" ({line})" * bool(line)
            raise NotChecked(f"the step {text}{location}")
        self.handles = [handle for handle, _ in compat.changed_by(self.graph)]

    @compat.do_not_convert
    def _begin(self, share: Share, is_first: tf.Tensor) -> None:
        """Let the model work on a part of a batch, as in a step of ``fit``, while the step is traced."""
        context = self._context
        replaced = self._while_tracing
        # A real exchange would wait for the other ranks, which may not get this far.
        self._world = _VirtualRanks(tf.compat.v1.get_default_graph(), is_first)
        for layer in context.objects.layers:
            if _differs_in_noise_only(layer):
                replaced.replace(layer, "call", _call_as_in_inference)
        for optimizer in training_state.optimizers(context.model):
            self._record(optimizer, replaced)
        # Metrics may count anything, and moving averages are state: neither belongs to what is compared.
        objects = replace(context.objects, metrics=[], trackers=[], statistics=[])
        virtual = copy.copy(context)
        virtual.world = self._world
        # In "train", the step would replace random generators and synchronize layers.
        virtual.mode = "check"
        virtual.objects = objects
        replaced.enter_context(Step(virtual, share))
        step = current_step()
        assert step is not None
        step.is_dry_run = True
        self.step = step
        self._metric_results = note_numbers(step, context.objects.metrics, replaced)

    def title_of(self, name: str) -> str | None:
        """Return what the user calls a number that a metric or the logs get; None for a result of metrics, too."""
        number = self.step.numbers[name]
        taker, _, position = name.partition(" ")
        if taker == METRIC:
            metric = self._context.objects.metrics[int(position.split()[0])]
            return f"the metric {metric.name!r}"
        if taker != LOGS or not isinstance(self.logs, dict):
            return None
        results = set(map(id, self._metric_results))
        if any(id(tensor) in results for tensor in compat.tensors_behind([self.numbers[name]])):
            return None
        for key, log in self.logs.items():
            if log is number:
                return f"the log {key!r}"
        return None

    def _record(self, optimizer: Any, replaced: Replaced) -> None:
        """Take the gradients that an optimizer would apply."""
        # An optimizer around another one hands its gradients on: the step may call either.
        optimizers = compat.with_inner(optimizer)
        reducers = map(reducer_of, optimizers)
        weighted_reducers = (
            candidate for candidate in reducers if isinstance(candidate, WeightedReducer)
        )
        reducer = next(weighted_reducers, None)

        def apply_gradients(original: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            weighted = [gradient for gradient, _ in pairs]
            if reducer is not None:
                weighted = reducer.weighted_once(weighted, self.step, optimizer)
            for (gradient, variable), weighted_gradient in zip(pairs, weighted):
                if gradient is not None:
                    self.variables.append(variable)
                    self.gradients.append(gradient)
                    self.reducers.append(reducer)
                    self._weighted.append(weighted_gradient)
            return optimizer.iterations

        def apply(original: Any, grads: Any, trainable_variables: Any = None) -> Any:
            variables = compat.variables_to_update(optimizer, trainable_variables)
            return apply_gradients(original, zip(grads, variables))

        for recorded in optimizers:
            replaced.replace(recorded, "apply_gradients", apply_gradients)
            if hasattr(recorded, "apply"):
                replaced.replace(recorded, "apply", apply)

    @compat.do_not_convert
    def _returned_tensors(self, logs: Any) -> Any:
        """Return the tensors of which ``StepResults`` are made, but for the state, and what the ranks send."""
        self.logs = logs
        for number in tf.nest.flatten(logs):
            self.step.register_number(LOGS, number)
        graph = self._world.graph
        flat = tf.nest.flatten(self._weighted, expand_composites=True)
        if not all(compat.is_in_graph(graph, tensor) for tensor in flat):
            raise NotChecked("the step applies gradients in a branch or a loop")
        # A model that its step has never called has no losses.
        with contextlib.suppress(AttributeError, ValueError):
            losses = self._context.model.losses
            self.losses += [loss for loss in losses if compat.is_in_graph(graph, loss)]
        self.chosen_tensors = self._choose(graph)
        for name, number in self.step.numbers.items():
            if _is_number(number):
                tensor = tf.convert_to_tensor(number)
                if compat.is_in_graph(graph, tensor):
                    self.numbers[name] = tensor
        gradients = list(map(_without_slices, self._weighted))
        losses = list(map(tf.reduce_sum, self.losses))
        compat.without_noise(graph)
        return (gradients, losses, self.numbers, self.chosen_tensors), self._world.sent

    def state(self) -> list[np.ndarray]:
        """Return the values of the variables that the step changes."""
        return [compat.value_of_handle(handle).numpy() for handle in self.handles]

    def run(self, parts: Sequence[Part]) -> list[StepResults]:
        """Run the step on all parts of a batch, as ranks that exchange what it exchanges."""
        # Each run of a batch starts alone; what an earlier batch exchanged means nothing to it.
        self._world.forget()
        # A chain of exchanges settles one link per run, and one more run shows that nothing changes any more.
        for _ in range(len(self._world.sent) + 2):
            runs = [self._run(part) for part in parts]
            if len(parts) == 1 or self._world.deliver([sent for _, sent in runs]):
                return [step_results for step_results, _ in runs]
        raise NotChecked("what the ranks exchange in the step doesn't settle")

    def _run(self, part: Part) -> tuple[StepResults, list]:
        state_before = [compat.value_of_handle(handle) for handle in self.handles]
        counts = map(tf.constant, (part.units, part.total, part.is_first))
        try:
            tensors, sent = self._function(part.data, *counts)
            state = self.state()
        finally:
            # Restored also if the step fails: the model of the user must be as before.
            for handle, former in zip(self.handles, state_before):
                tf.raw_ops.AssignVariableOp(resource=handle, value=former)
        arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), tensors)
        return StepResults(state, *arrays), sent


def _without_slices(gradient: Any) -> Any:
    """Return a gradient in the form that a function can return it."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return gradient


def _is_number(number: Any) -> bool:
    if not tf.is_tensor(number):
        return isinstance(number, (int, float)) and not isinstance(number, bool)
    return number.shape.rank == 0 and (number.dtype.is_floating or number.dtype.is_integer)


def _differs_in_noise_only(layer: Any) -> bool:
    """Return True for a layer of Keras's own that draws random numbers or normalises a batch when it trains."""
    if hasattr(layer, "train_step"):
        return False
    layers = compat.all_layers(layer)
    is_from_keras = all(compat.belongs_to_keras(type(inner).call) for inner in layers)
    return is_from_keras and "training" in inspect.signature(type(layer).call).parameters


def _call_as_in_inference(original: Callable, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["training"] = False
    return original(*bound.args, **bound.kwargs)


# Virtual ranks exist only in the trace. A step is traced once, as one rank. It runs for one part after the other, so
# that none of them knows what the others send. So it runs several times: each time the exchanges have the results of
# what was sent the last time, until they no longer change.


class _VirtualRanks:
    """Stands in for a ``World`` in a trace; ``is_first`` is a tensor, True for the part with the first samples."""

    rank = 0
    size = 2
    is_main = True

    def __init__(self, graph: Any, is_first: tf.Tensor) -> None:
        self.graph = graph
        self.is_first = is_first
        self.sent: list[tf.Tensor] = []  # what the step sends, by exchange
        # By exchange, True if it joins what parts send, and otherwise adds that up; and a variable that holds what
        # comes of it, empty while each part has what it has sent itself.
        self._exchanges: list[tuple[bool, Any]] = []

    def sum_over_ranks(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._exchange(tensor, False, self.sum_over_ranks)

    def gather(self, tensor: tf.Tensor, purpose: str = "") -> tf.Tensor:
        def own_rows(upstream: tf.Tensor) -> tf.Tensor:
            rows = tf.shape(tensor)[0]
            end = tf.shape(upstream)[0]
            begin = tf.where(self.is_first, 0, end - rows)
            return self.sum_over_ranks(upstream)[begin : begin + rows]

        return self._exchange(tensor, True, own_rows)

    def reduce(self, tensors: Sequence, options: ReductionOptions) -> list:
        if options.reduction != "sum":
            raise NotChecked(f"the step reduces by {options.reduction!r} itself")
        return [
            tensor if tensor is None else self.sum_over_ranks(tf.convert_to_tensor(tensor))
            for tensor in tensors
        ]

    def _exchange(self, tensor: tf.Tensor, joins: bool, gradient: Callable) -> tf.Tensor:
        """Return what comes of an exchange, with its gradient as a function of that of the result."""
        tensor = tf.convert_to_tensor(tensor)
        if not compat.is_in_graph(self.graph, tensor):
            raise NotChecked("the ranks exchange values in a branch or a loop of the step")
        # Made outside of the graph, so that the values remain from one run to the next.
        with tf.init_scope():
            empty = np.zeros([0], tensor.dtype.as_numpy_dtype)
            received = compat.plain_variable(empty, shape=tf.TensorShape(None))
        self.sent.append(tensor)
        self._exchanges.append((joins, received))
        exchanged = tf.cond(
            tf.size(received) > 0, lambda: tf.identity(received), lambda: tf.identity(tensor)
        )
        shape = tensor.shape
        if joins:
            shape = [None, *tensor.shape[1:]]
        exchanged.set_shape(shape)
        exchanged = tf.stop_gradient(exchanged)
        if not tensor.dtype.is_floating:
            return exchanged
        return differentiable([exchanged], lambda upstream: [gradient(upstream)], [tensor])[0]

    def forget(self) -> None:
        """Let each part get what it has sent itself, as if it were alone."""
        for _, received in self._exchanges:
            received.assign([])

    def deliver(self, sent: Sequence[Sequence]) -> bool:
        """Give the exchanges what all parts have sent; return True if nothing has changed."""
        is_settled = True
        for (joins, received), tensors in zip(self._exchanges, zip(*sent)):
            arrays = list(map(np.asarray, tensors))
            if joins:
                result = np.concatenate(arrays)
            elif len({array.shape for array in arrays}) > 1:
                is_settled = False  # the exchange depends on others that have no results yet
                continue
            else:
                result = sum(arrays[1:], arrays[0])
            if not np.array_equal(received.numpy(), result):
                is_settled = False
                received.assign(result)
        return is_settled
