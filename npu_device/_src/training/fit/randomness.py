"""Random numbers in a training step: each rank draws its own for its samples, as one process does for all of them.

Generators keep the same state on all ranks, so that it can be saved; the rank is mixed in at the draw. Operations that
keep their state to themselves (``tf.random.normal``, most of tf-keras) get a seed per rank while the step is traced.

Exceptions are found in the graph that is traced: a draw has numbers for each sample (a dropout mask), or is one for the
whole batch (whether to skip a layer), which stays the same on all ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.world.world import World

_APART = (
    1_000_003  # between the seeds of neighbouring ranks; scripts' own seeds are closer together
)
_SHOWN = 4


class NumbersOfRank:
    """Lets a training step, eager or traced, draw the numbers of this rank from ``begin`` to ``end``."""

    def __init__(self, world: World, generators: Sequence[Any], replaced: Replaced) -> None:
        self._offset = world.rank * _APART
        self._generators = generators
        self._replaced = replaced
        self._graph: Any = None
        self._first = 0
        self._seed: int | None = None
        self._before: Any = None

    def begin(self) -> None:
        """Mix the rank into what generators return, and into the seed of the graph that is being traced."""
        if environment.NPU_DEVICE_STEP_RANDOM.get() == "same":
            return
        for generator in self._generators:
            name = "skip" if isinstance(generator, tf.random.Generator) else "next"
            self._replaced.replace(generator, name, self._mixed)
        if tf.executing_eagerly():
            self._before = compat.random_state()
            return
        graph = tf.compat.v1.get_default_graph()
        if isinstance(graph, compat.FuncGraph):
            self._graph, self._first, self._seed = graph, len(graph.get_operations()), graph.seed
            if self._seed is not None:
                graph.seed = self._seed + self._offset

    def end(self) -> None:
        if self._graph is not None:
            self._graph.seed = self._seed

    def settle(self, share: Any, weights: Sequence[Any]) -> list[Draw]:
        """Give all ranks the same numbers where a traced step draws once for the whole batch; return its draws."""
        if self._graph is None:
            drew = self._before is not None and self._before != compat.random_state()
            return [Draw("tf.random", stateful=True, shared=EAGER)] if drew else []
        samples = [
            leaf for leaf in tf.nest.flatten(share, expand_composites=True) if tf.is_tensor(leaf)
        ]
        shapes = {tuple(weight.shape) for weight in weights}
        draws = draws_of(self._graph, self._first, samples, shapes)
        for draw in draws:
            if draw.shared and not draw.stateful:
                [mixed] = draw.operation.outputs
                for user in mixed.consumers():
                    for place, each in enumerate(user.inputs):
                        if each is mixed:
                            compat.replace_input(user, place, draw.operation.inputs[0])
            elif draw.shared and self._seed is not None:
                compat.set_seed_of(draw.operation, self._seed)
        return draws

    def _mixed(self, own: Callable[..., tf.Tensor], *args: Any, **kwargs: Any) -> tf.Tensor:
        """Return the state to draw from; the generator itself moves on by the same on all ranks."""
        state = own(*args, **kwargs)
        # A Keras generator's seed and count, or a TensorFlow generator's count and key.
        offset = [self._offset, *[0] * (int(state.shape[0]) - 1)]
        if isinstance(getattr(own, "__self__", None), tf.random.Generator):
            offset.reverse()
        return tf.add(state, tf.constant(offset, state.dtype), name=MARK)


def lines(model: Any, draws: Sequence[Draw]) -> list[str]:
    """Return how the ranks draw the random numbers of a step, for rank 0 to say (``start.say``)."""
    said = [("each rank its own    {}", [draw for draw in draws if not draw.shared])]
    for why in dict.fromkeys(draw.shared for draw in draws if draw.shared):
        said.append(
            (f"same on all ranks    {{}}: {why}", [draw for draw in draws if draw.shared == why])
        )
    alone = "each rank decides    {}: in a function that the step calls; drawn in the step, it is shared"
    said.append((alone, [draw for draw in draws if draw.decides_alone]))
    stateful = "not in a checkpoint  {}: the operation keeps its state to itself"
    said.append((stateful, [draw for draw in draws if draw.stateful]))
    title = f"npu_device: random numbers in the step of {type(model).__name__} {model.name!r}"
    return [title, *(f"  {text.format(_names(chosen))}" for text, chosen in said if chosen)]


def _names(draws: Iterable[Draw]) -> str:
    names = list(dict.fromkeys(draw.name for draw in draws))
    return ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


MARK = "npu_device_numbers_of_rank"
"""Name of the operation that mixes the rank into the state of a generator."""

DECIDES, WHOLE_BATCH, KEPT = (
    "decides what the step does",
    "is one for the whole batch",
    "is kept in a variable",
)
EAGER = "is in an eager step, whose Python code may decide by it"
"""Why all ranks share a draw."""

# What the other ranks know, too: the result of a transfer depends on no rank's numbers.
_TRANSFERS = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "Collective")
_NUMBER = re.compile(r"_\d+$")  # by which TensorFlow tells operations of one name apart
_SEEDS = (
    "StatelessRandomGet",
    "StatelessRandomUniformFullInt",
)  # operations that make seeds of seeds
_ASSIGNMENTS = (
    "Assign",
    "Resource",
)  # AssignVariableOp, AssignAddVariableOp, ResourceApplyAdam, ResourceScatterAdd


@dataclass(frozen=True)
class Draw:
    name: str  # of what draws, for messages
    stateful: bool  # an operation with a state of its own draws, not a generator
    shared: str  # why all ranks share it; "" if each rank draws its own
    decides_alone: bool = (
        False  # it decides what a function does that the step calls, on each rank differently
    )
    operation: Any = (
        None  # what draws, or mixes the rank into a generator's state; None in eager mode
    )


def draws_of(
    graph: tf.Graph, first: int, samples: Sequence[tf.Tensor], shapes: set[tuple[int, ...]]
) -> list[Draw]:
    """Return the draws of a step whose operations begin with the ``first``; ``shapes`` are those of the weights."""
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
    return draws + [
        Draw(_name(each), is_stateful(each), "", each.name in alone, each)
        for each in flow.draws_inside()
    ]


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
        _have_seeds[operation.type] = {"seed", "seed2"} <= {
            attribute.name for attribute in operation.op_def.attr
        }
    return _have_seeds[operation.type]


_have_seeds: dict[str, bool] = {}
"""By the type of an operation."""


def _is_draw(operation: tf.Operation) -> bool:
    return operation.name.rpartition("/")[2].startswith(MARK) or is_stateful(operation)


def _drawn_from(mark: tf.Operation) -> list[tf.Operation]:
    """Return the random operations that a generator's state goes to; none if one is in a branch, loop or function."""

    def users(operation: tf.Operation) -> list[tf.Operation]:
        # Seeds that are themselves drawn are followed to what is drawn from them.
        if _draws_from_seeds(operation):
            return []
        return [user for tensor in operation.outputs for user in tensor.consumers()]

    operations = list(compat.walk([mark], users))
    if any(map(compat.functions_of, operations)):
        return []
    return list(filter(_draws_from_seeds, operations))


def _draws_from_seeds(operation: tf.Operation) -> bool:
    return operation.type.startswith("Stateless") and not operation.type.startswith(_SEEDS)


def _is_per_sample(drawn: tf.Operation, flow: _Flow, rows: set[int]) -> bool:
    shape = drawn.outputs[0].shape
    if not shape.is_fully_defined() or rows & set(shape.as_list()):
        return True
    return flow.reach([drawn.inputs[0]]).samples if drawn.inputs else False


def _is_for_whole_batch(drawn: tf.Operation, shapes: set[tuple[int, ...]]) -> bool:
    """Return True for a number, for what is drawn for a variable, and for what is repeated for each sample."""
    shape = tuple(drawn.outputs[0].shape.as_list())
    return not shape or shape[0] == 1 or shape in shapes


@dataclass
class _Reach:
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
        for operation in graph.get_operations():
            if functions := compat.functions_of(operation):
                self._inside[operation.name] = {
                    name: list(map(_Flow, graphs)) for name, graphs in functions.items()
                }

    def draws_behind(self, targets: Iterator[list[tf.Tensor]]) -> set[str]:
        """Return the draws behind values that don't depend on this rank's samples: all ranks have to have the same."""
        reached = map(self.reach, targets)
        return {draw for reach in reached if not reach.samples for draw in reach.draws}

    def _functions(self) -> Iterator[tuple[tf.Operation, dict[str, list[_Flow]], _Flow]]:
        """Yield each function inside, after its operation and all of that."""
        for name, inside in self._inside.items():
            for flow in itertools.chain(*inside.values()):
                yield self._graph.get_operation_by_name(name), inside, flow

    def _from_inside(
        self, find: Callable[[_Flow], Iterator[list[tf.Tensor]]]
    ) -> Iterator[list[tf.Tensor]]:
        """Yield what is found in the functions inside, as tensors of this graph."""
        for operation, inside, flow in self._functions():
            for tensors in find(flow):
                yield self._outside(operation, inside, flow.reach(tensors).inputs)

    def decisions(self) -> Iterator[list[tf.Tensor]]:
        """Yield tensors of this graph by which its branches and loops, and those inside them, decide."""
        for name, inside in self._inside.items():
            operation = self._graph.get_operation_by_name(name)
            if "cond" in inside:
                yield self._outside(operation, inside, set())
            elif "f" not in inside:
                yield [operation.inputs[0]]
        yield from self._from_inside(_Flow.decisions)

    def deciding_in_functions(self) -> set[str]:
        """Return the draws inside functions by which these decide, whatever the samples are."""
        found = set()
        for operation, inside, flow in self._functions():
            found |= flow.deciding_in_functions()
            for reach in map(flow.reach, flow.decisions() if "f" in inside else ()):
                if (
                    reach.draws
                    and not self.reach(self._outside(operation, inside, reach.inputs)).samples
                ):
                    found |= reach.draws
        return found

    def draws_inside(self) -> Iterator[tf.Operation]:
        for _, _, flow in self._functions():
            yield from filter(_is_draw, flow._graph.get_operations())
            yield from flow.draws_inside()

    def assignments(self) -> Iterator[list[tf.Tensor]]:
        """Yield tensors of this graph that are assigned to variables, also inside branches, loops and functions."""
        for operation in self._graph.get_operations():
            if operation.type.startswith(_ASSIGNMENTS):
                yield list(operation.inputs)[1:]
        yield from self._from_inside(_Flow.assignments)

    def _outside(
        self, operation: tf.Operation, inside: dict[str, list[_Flow]], places: set[int]
    ) -> list[tf.Tensor]:
        if "cond" in inside:
            return [operation.inputs[place] for place in self._loop(inside, places)]
        offset = 0 if "f" in inside else 1
        return [operation.inputs[place + offset] for place in places]

    def reach(self, tensors: Sequence[tf.Tensor]) -> _Reach:
        """Return what tensors depend on; no more than that, once it is known that they depend on samples."""
        reach = _Reach(set(), set())
        for tensor in compat.walk(tensors, self._sources):
            operation = tensor.op
            if tensor.name in self._samples:
                reach.samples = True
                return reach
            if operation.name in self._inputs:
                reach.inputs.add(self._inputs[operation.name])
            elif _is_draw(operation):
                reach.draws.add(operation.name)
        return reach

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return the tensors from which one is computed; none for a draw, and for what comes from all ranks."""
        operation = tensor.op
        output = tensor.value_index
        is_start = operation.name in self._inputs or _is_draw(operation)
        if is_start or operation.type.startswith(_TRANSFERS):
            return []
        inside = self._inside.get(operation.name)
        if inside is None:
            return list(operation.inputs)
        if "cond" in inside:
            return self._outside(operation, inside, {output})
        flows = itertools.chain(*inside.values())
        places = {
            place for flow in flows for place in flow.reach([flow._graph.outputs[output]]).inputs
        }
        decides = [] if "f" in inside else [operation.inputs[0]]
        return [*decides, *self._outside(operation, inside, places)]

    def _loop(self, inside: dict[str, list[_Flow]], places: set[int]) -> set[int]:
        """Return on which of a loop's variables its number of rounds and some others depend."""
        [condition], [body] = inside["cond"], inside["body"]
        found = places | condition.reach(condition._graph.outputs).inputs
        while True:
            more = body.reach([body._graph.outputs[place] for place in found]).inputs - found
            if not more:
                return found
            found |= more
