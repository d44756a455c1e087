"""The random numbers that the graph of a step draws: what each draw is for, which decides whether ranks share it.

A draw has numbers for each sample (a dropout mask), or is one for the whole batch (whether to skip a layer). This file
finds that out from the graph while it is traced. ``randomness`` acts by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from npu_device._src import compat

MARK = "npu_device_numbers_of_rank"
"""Name of the operation that mixes the rank into the state of a generator."""

DECIDES, WHOLE_BATCH, KEPT = "decides what the step does", "is one for the whole batch", "is kept in a variable"
EAGER = "is in an eager step, whose Python code may decide by it"
"""Why all ranks share a draw."""

# What the other ranks know, too: the result of a transfer depends on no rank's numbers.
_TRANSFERS = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "Collective")
_NUMBER = re.compile(r"_\d+$")  # by which TensorFlow tells operations of one name apart
_SEEDS = ("StatelessRandomGet", "StatelessRandomUniformFullInt")  # operations that make seeds of seeds
_ASSIGNMENTS = ("Assign", "Resource")  # AssignVariableOp, AssignAddVariableOp, ResourceApplyAdam, ResourceScatterAdd


@dataclass(frozen=True)
class Draw:
    name: str  # of what draws, for messages
    stateful: bool  # an operation with a state of its own draws, not a generator
    shared: str  # why all ranks share it; "" if each rank draws its own
    decides_alone: bool = False  # it decides what a function does that the step calls, on each rank differently
    operation: Any = None  # what draws, or mixes the rank into a generator's state; None in eager mode


def draws_of(graph: tf.Graph, first: int, samples: Sequence[tf.Tensor], shapes: set[tuple[int, ...]]) -> list[Draw]:
    """Return the draws of a step that has been traced.

    Args:
        graph: the graph that the step is in. Draws inside its branches, loops and functions are each rank's own.
        first: number of operations that the graph had before the step.
        samples: tensors of the share of this rank, on which everything depends that isn't the same on all ranks.
        shapes: shapes of the variables of the model.
    """
    operations = graph.get_operations()[first:]
    found = [operation for operation in operations if _is_draw(operation)]
    flow = _Flow(graph, samples)
    rows = {tensor.shape[0] for tensor in samples if tensor.shape.rank} - {None}
    deciding = flow.draws_behind(flow.decisions())
    kept: set[str] | None = None
    draws = []
    for operation in found:
        drawn = [operation] if is_stateful(operation) else _drawn_from(operation)
        shared = ""
        if operation.name in deciding:
            shared = DECIDES
        elif drawn and not any(_is_per_sample(each, flow, rows) for each in drawn):
            if all(_is_for_whole_batch(each, shapes) for each in drawn):
                shared = WHOLE_BATCH
            else:
                kept = flow.draws_behind(flow.assignments()) if kept is None else kept
                shared = KEPT if operation.name in kept else ""
        draws.append(Draw(_name(operation), is_stateful(operation), shared, operation=operation))
    alone = flow.deciding_in_functions()
    return draws + [Draw(_name(each), is_stateful(each), "", each.name in alone, each) for each in flow.draws_inside()]


def _name(operation: tf.Operation) -> str:
    """Return the place of a draw in the model, without the operations that a layer consists of."""
    path = operation.name.replace(MARK, "a generator").split("/")
    scopes = [_NUMBER.sub("", scope) for scope in path[:-1]]
    while len(scopes) > 1 and scopes[-1].startswith(("random_", "stateful_", "stateless_")):
        scopes.pop()
    return "/".join(scopes or path)


def is_stateful(operation: tf.Operation) -> bool:
    """Return True for a random operation that keeps its state to itself, such as that of ``tf.random.normal``."""
    if operation.type not in _have_seeds:
        _have_seeds[operation.type] = {"seed", "seed2"} <= {attribute.name for attribute in operation.op_def.attr}
    return _have_seeds[operation.type]


_have_seeds: dict[str, bool] = {}
"""By the type of an operation."""


def _is_draw(operation: tf.Operation) -> bool:
    return operation.name.rpartition("/")[2].startswith(MARK) or is_stateful(operation)


def _drawn_from(mark: tf.Operation) -> list[tf.Operation]:
    """Return the random operations that a generator's state goes to; none if one is inside a branch, loop or function.

    Seeds that are themselves drawn are followed to what is drawn from them.
    """
    found: list[tf.Operation] = []
    seen: set[str] = set()
    waiting = [mark]
    while waiting:
        for tensor in waiting.pop().outputs:
            for user in tensor.consumers():
                if compat.functions_of(user):
                    return []
                if user.name in seen:
                    continue
                seen.add(user.name)
                if user.type.startswith("Stateless") and not user.type.startswith(_SEEDS):
                    found.append(user)
                else:
                    waiting.append(user)
    return found


def _is_per_sample(drawn: tf.Operation, flow: _Flow, rows: set[int]) -> bool:
    shape = drawn.outputs[0].shape
    if not shape.is_fully_defined():
        return True
    if rows & set(shape.as_list()):
        return True
    return flow.reach([drawn.inputs[0]]).samples if drawn.inputs else False


def _is_for_whole_batch(drawn: tf.Operation, shapes: set[tuple[int, ...]]) -> bool:
    """Return True for a number, for what is drawn for a variable, and for what is repeated for each sample."""
    shape = tuple(drawn.outputs[0].shape.as_list())
    return not shape or shape[0] == 1 or shape in shapes


@dataclass
class _Reach:
    """What tensors depend on."""

    draws: set[str]  # their names
    inputs: set[int]  # of the graph, their positions
    samples: bool = False  # of this rank


class _Flow:
    """What depends on what in the graph of a function, also through its branches, loops and functions."""

    def __init__(self, graph: Any, samples: Sequence[tf.Tensor] = ()) -> None:
        self._graph = graph
        self._samples = {tensor.name for tensor in samples}
        self._inputs = {tensor.op.name: place for place, tensor in enumerate(graph.inputs)}
        self._inside: dict[str, dict[str, list[_Flow]]] = {}

    def draws_behind(self, targets: Iterator[list[tf.Tensor]]) -> set[str]:
        """Return the draws behind values that don't depend on this rank's samples: all ranks have to have the same."""
        reached = map(self.reach, targets)
        return {draw for reach in reached if not reach.samples for draw in reach.draws}

    def decisions(self) -> Iterator[list[tf.Tensor]]:
        """Yield tensors of this graph by which its branches and loops, and those inside them, decide."""
        for operation in self._graph.get_operations():
            inside = self._flows(operation)
            if "cond" in inside:
                yield self._outside(operation, inside, set())
            elif inside and "f" not in inside:
                yield [operation.inputs[0]]
            for flow in _all(inside):
                for tensors in flow.decisions():
                    yield self._outside(operation, inside, flow.reach(tensors).inputs)

    def deciding_in_functions(self) -> set[str]:
        """Return the draws inside functions by which these decide, whatever the samples are."""
        found = set()
        for operation in self._graph.get_operations():
            inside = self._flows(operation)
            for flow in _all(inside):
                found |= flow.deciding_in_functions()
                for reach in map(flow.reach, flow.decisions() if "f" in inside else ()):
                    if reach.draws and not self.reach(self._outside(operation, inside, reach.inputs)).samples:
                        found |= reach.draws
        return found

    def draws_inside(self) -> Iterator[tf.Operation]:
        for operation in self._graph.get_operations():
            for flow in _all(self._flows(operation)):
                yield from filter(_is_draw, flow._graph.get_operations())
                yield from flow.draws_inside()

    def assignments(self) -> Iterator[list[tf.Tensor]]:
        """Yield tensors of this graph that are assigned to variables, also inside branches, loops and functions."""
        for operation in self._graph.get_operations():
            inside = self._flows(operation)
            if operation.type.startswith(_ASSIGNMENTS):
                yield list(operation.inputs)[1:]
            for flow in _all(inside):
                for tensors in flow.assignments():
                    yield self._outside(operation, inside, flow.reach(tensors).inputs)

    def _outside(self, operation: tf.Operation, inside: dict[str, list[_Flow]], places: set[int]) -> list[tf.Tensor]:
        if "cond" in inside:
            return [operation.inputs[place] for place in self._loop(inside, places)]
        offset = 0 if "f" in inside else 1
        return [operation.inputs[place + offset] for place in places]

    def reach(self, tensors: Sequence[tf.Tensor]) -> _Reach:
        """Return what tensors depend on; no more than that, once it is known that they depend on samples."""
        found = _Reach(set(), set())
        seen = {tensor.name for tensor in tensors}
        waiting = list(tensors)
        while waiting:
            tensor = waiting.pop()
            operation = tensor.op
            if tensor.name in self._samples:
                found.samples = True
                return found
            elif operation.name in self._inputs:
                found.inputs.add(self._inputs[operation.name])
            elif _is_draw(operation):
                found.draws.add(operation.name)
            elif not operation.type.startswith(_TRANSFERS):
                for source in self._sources(operation, tensor.value_index):
                    if source.name not in seen:
                        seen.add(source.name)
                        waiting.append(source)
        return found

    def _sources(self, operation: tf.Operation, output: int) -> list[tf.Tensor]:
        inside = self._flows(operation)
        inputs = list(operation.inputs)
        if not inside:
            return inputs
        if "cond" in inside:
            return [inputs[place] for place in self._loop(inside, {output})]
        places = {place for flow in _all(inside) for place in flow.reach([flow._graph.outputs[output]]).inputs}
        if "f" in inside:
            return [inputs[place] for place in places]
        return [inputs[0], *(inputs[place + 1] for place in places)]

    def _loop(self, inside: dict[str, list[_Flow]], places: set[int]) -> set[int]:
        """Return on which of a loop's variables its number of rounds and some others depend."""
        [condition], [body] = inside["cond"], inside["body"]
        found = places | condition.reach(condition._graph.outputs).inputs
        while True:
            more = body.reach([body._graph.outputs[place] for place in found]).inputs - found
            if not more:
                return found
            found |= more

    def _flows(self, operation: tf.Operation) -> dict[str, list[_Flow]]:
        if operation.name not in self._inside:
            functions = compat.functions_of(operation)
            self._inside[operation.name] = {name: list(map(_Flow, graphs)) for name, graphs in functions.items()}
        return self._inside[operation.name]


def _all(inside: dict[str, list[_Flow]]) -> list[_Flow]:
    return [flow for flows in inside.values() for flow in flows]
