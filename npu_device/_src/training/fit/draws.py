"""The draws of random numbers in a traced step, and which of them are the same on all ranks.

A draw has numbers for each sample (a dropout mask), or is one for the whole batch (whether to skip a layer), which
stays the same on all ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from npu_device._src.training.fit.data_flow import DataFlow
from npu_device._src.training.fit.random_operations import (
    MARK,
    drawing_operations,
    is_draw,
    is_stateful,
)

DECIDES = "decides what the step does"
WHOLE_BATCH = "is one for the whole batch"
KEPT = "is kept in a variable"
EAGER = "is in an eager step, whose Python code may decide by it"
"""Why a draw is the same on all ranks."""

_NAME_SUFFIX = re.compile(r"_\d+$")  # suffix by which TensorFlow tells operations of one name apart
_RANDOM_SCOPES = ("random_", "stateful_", "stateless_")


@dataclass(frozen=True)
class Draw:
    """A draw of a step.

    Attributes:
        name: of what draws, for messages.
        is_stateful: an operation with a state of its own draws, not a generator.
        common: why it is the same on all ranks; "" if each rank draws its own.
        decides_alone: it decides what a function does that the step calls, on each rank differently.
        operation: what draws, or mixes the rank into a generator's state; None in eager mode.
    """

    name: str
    is_stateful: bool
    common: str
    decides_alone: bool = False
    operation: Any = None


def draws_of(
    graph: tf.Graph, start: int, samples: Sequence[tf.Tensor], weight_shapes: set[tuple[int, ...]]
) -> list[Draw]:
    """Return the draws of a step whose operations begin with number ``start`` of a graph."""
    flow = DataFlow(graph, samples)
    reasons = _Reasons(flow, samples, weight_shapes)
    draws = []
    for operation in filter(is_draw, graph.get_operations()[start:]):
        name = _name(operation)
        common = reasons.of(operation)
        draws.append(Draw(name, is_stateful(operation), common, operation=operation))
    deciding = flow.draws_deciding_inside()
    for operation in flow.draws_inside():
        name = _name(operation)
        decides_alone = operation.name in deciding
        draws.append(Draw(name, is_stateful(operation), "", decides_alone, operation))
    return draws


class _Reasons:
    """Why draws of a step are the same on all ranks."""

    def __init__(
        self, flow: DataFlow, samples: Sequence[tf.Tensor], weight_shapes: set[tuple[int, ...]]
    ) -> None:
        self._flow = flow
        self._weight_shapes = weight_shapes
        self._rows = {tensor.shape[0] for tensor in samples if tensor.shape.rank}
        self._deciding = flow.draws_behind(flow.decisions())

    def of(self, draw: tf.Operation) -> str:
        """Return why a draw is the same on all ranks; "" if each rank draws its own."""
        if draw.name in self._deciding:
            return DECIDES
        operations = drawing_operations(draw)
        if not operations or any(map(self._is_per_sample, operations)):
            return ""
        if all(map(self._is_for_whole_batch, operations)):
            return WHOLE_BATCH
        if draw.name in self._assigned:
            return KEPT
        return ""

    def _is_per_sample(self, operation: tf.Operation) -> bool:
        shape = operation.outputs[0].shape
        # The unknown dimension in a step is the number of samples.
        if not shape.is_fully_defined() or self._rows & set(shape.as_list()):
            return True
        return self._flow.reach(operation.inputs[:1]).has_samples

    def _is_for_whole_batch(self, operation: tf.Operation) -> bool:
        """Return True for a number, for what is drawn for a variable, and for what is repeated for each sample."""
        shape = tuple(operation.outputs[0].shape.as_list())
        # A first axis of 1 is broadcast over the samples.
        return not shape or shape[0] == 1 or shape in self._weight_shapes

    # Seldom asked for.
    @functools.cached_property
    def _assigned(self) -> set[str]:
        """Draws that variables are set to."""
        return self._flow.draws_behind(self._flow.assignments())


def _name(operation: tf.Operation) -> str:
    """Return the place of a draw in the model, without the operations that a layer consists of."""
    path = operation.name.replace(MARK, "a generator").split("/")
    scopes = [_NAME_SUFFIX.sub("", scope) for scope in path[:-1]]
    # TensorFlow's own functions for random numbers add these scopes, which mean nothing to the
    # user.
    while len(scopes) > 1 and scopes[-1].startswith(_RANDOM_SCOPES):
        scopes.pop()
    return "/".join(scopes or path)
