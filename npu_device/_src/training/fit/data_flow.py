"""What depends on what in the graph of a step: which draws and which samples are behind a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.dtypes import TensorList
from npu_device._src.training.fit.random_operations import is_draw

# Transfers end the search: their results are known to the other ranks, too, and depend on no rank's numbers.
_TRANSFERS = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "Collective")

# Operations such as AssignVariableOp, AssignAddVariableOp, ResourceApplyAdam and ResourceScatterAdd begin so.
_ASSIGNMENTS = ("Assign", "Resource")


@dataclass
class Reach:
    """What tensors depend on."""

    draws: set[str]  # names of the draws
    inputs: set[int]  # positions of inputs of the graph
    has_samples: bool = False  # this rank's samples are among what they depend on


class DataFlow:
    """The dependencies in the graph of a function, also through its branches, loops and functions."""

    def __init__(self, graph: Any, samples: Sequence[tf.Tensor] = ()) -> None:
        self.graph = graph
        self._samples = {tensor.name for tensor in samples}
        self._inputs = {tensor.op.name: position for position, tensor in enumerate(graph.inputs)}
        self._calls_by_name: dict[str, _Call] = {}
        for operation in graph.get_operations():
            functions = compat.functions_of(operation)
            if functions:
                self._calls_by_name[operation.name] = _Call(operation, functions)

    # What tensors depend on

    def reach(self, tensors: Sequence[tf.Tensor]) -> Reach:
        """Return what tensors depend on; no more than that, once it is known that they depend on samples."""
        reach = Reach(set(), set())
        for tensor in compat.walk(tensors, self._sources):
            operation = tensor.op
            if tensor.name in self._samples:
                reach.has_samples = True
                return reach
            if operation.name in self._inputs:
                reach.inputs.add(self._inputs[operation.name])
            elif is_draw(operation):
                reach.draws.add(operation.name)
        return reach

    def _sources(self, tensor: tf.Tensor) -> TensorList:
        """Return the tensors from which one is computed; none for a draw, and for what comes from all ranks."""
        operation = tensor.op
        is_start = operation.name in self._inputs or is_draw(operation)
        if is_start or operation.type.startswith(_TRANSFERS):
            return []
        # The results of a collective pass through one together with its inputs, for the gradient.
        if operation.type == "IdentityN":
            return [operation.inputs[tensor.value_index]]
        call = self._calls_by_name.get(operation.name)
        if call is None:
            return list(operation.inputs)
        return call.sources(tensor.value_index)

    def draws_behind(self, targets: Iterator[TensorList]) -> set[str]:
        """Return the draws behind targets that don't depend on this rank's samples: all ranks have to have the same."""
        draws = set()
        for reach in map(self.reach, targets):
            if not reach.has_samples:
                draws |= reach.draws
        return draws

    # The tensors by which branches and loops decide, and those assigned to variables

    def decisions(self) -> Iterator[TensorList]:
        """Yield tensors of this graph by which its branches and loops, and those inside them, decide."""
        for call in self._calls_by_name.values():
            yield call.deciding_tensors()
        yield from self._from_inside(DataFlow.decisions)

    def assignments(self) -> Iterator[TensorList]:
        """Yield tensors of this graph that are assigned to variables, also inside branches, loops and functions."""
        for operation in self.graph.get_operations():
            if operation.type.startswith(_ASSIGNMENTS):
                # The first input is the variable itself.
                yield list(operation.inputs)[1:]
        yield from self._from_inside(DataFlow.assignments)

    def _from_inside(
        self, find: Callable[[DataFlow], Iterator[TensorList]]
    ) -> Iterator[TensorList]:
        """Yield what is found in the functions inside, as tensors of this graph."""
        for call, inner in self._inner_flows():
            for tensors in find(inner):
                yield call.arguments(inner.reach(tensors).inputs)

    def draws_inside(self) -> Iterator[tf.Operation]:
        """Yield the draws in the functions inside, at any depth."""
        for _, inner in self._inner_flows():
            yield from filter(is_draw, inner.graph.get_operations())
            yield from inner.draws_inside()

    def draws_deciding_inside(self) -> set[str]:
        """Return the draws inside functions by which these decide, whatever the samples are."""
        draws = set()
        for call, inner in self._inner_flows():
            draws |= inner.draws_deciding_inside()
            if not call.is_function:
                continue
            for reach in map(inner.reach, inner.decisions()):
                arguments = call.arguments(reach.inputs)
                # The function may be given samples, by which it decides on each rank anyway.
                if reach.draws and not self.reach(arguments).has_samples:
                    draws |= reach.draws
        return draws

    def _inner_flows(self) -> Iterator[tuple[_Call, DataFlow]]:
        for call in self._calls_by_name.values():
            for inner in call.flows:
                yield call, inner


class _Call:
    """An operation with functions inside: a branch, a loop, or the call of a function."""

    def __init__(self, operation: tf.Operation, functions: dict[str, list]) -> None:
        self.flows = list(map(DataFlow, itertools.chain(*functions.values())))
        self.is_function = "f" in functions
        self._is_loop = "cond" in functions
        # The first input of a branch decides, and isn't an argument.
        count = int(not self.is_function and not self._is_loop)
        self._deciding = list(operation.inputs[:count])
        self._arguments = operation.inputs[count:]

    def sources(self, output: int) -> TensorList:
        """Return the tensors around the operation on which one of its outputs depends."""
        if self._is_loop:
            # The outputs of a loop are its variables, one for each input.
            return self.arguments({output})
        inputs = set()
        for flow in self.flows:
            inputs |= flow.reach([flow.graph.outputs[output]]).inputs
        return [*self.deciding_tensors(), *self.arguments(inputs)]

    def deciding_tensors(self) -> TensorList:
        """Return the tensors by which the operation decides; none for a function."""
        if self._is_loop:
            return self.arguments(set())
        return self._deciding

    def arguments(self, inputs: set[int]) -> TensorList:
        """Return the tensors around the operation that some inputs of its functions are given.

        For a loop, these are all that the inputs and its number of rounds depend on.
        """
        if self._is_loop:
            inputs = self._loop_variables_behind(inputs)
        return [self._arguments[position] for position in inputs]

    def _loop_variables_behind(self, variables: set[int]) -> set[int]:
        """Return on which of the variables of a loop its number of rounds, and those given, depend."""
        [condition, body] = self.flows
        reached = variables | condition.reach(condition.graph.outputs).inputs
        # A variable of the loop may depend on another one only after several rounds.
        while True:
            outputs = [body.graph.outputs[position] for position in reached]
            new = body.reach(outputs).inputs - reached
            if not new:
                return reached
            reached |= new
