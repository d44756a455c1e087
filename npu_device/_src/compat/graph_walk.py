"""One walk over graphs: of tensors, operations or functions, along whatever connects them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

_Node = TypeVar("_Node")
_name = operator.attrgetter("name")


def walk(
    starts: Iterable[_Node],
    neighbours: Callable[[_Node], Iterable[_Node]],
    key: Callable[[Any], Hashable] = _name,
) -> Iterator[_Node]:
    """Yield nodes, and all nodes to which their neighbours lead, each once.

    ``key`` tells nodes apart; tensors and operations of one graph have names. The neighbours of a node are asked for
    when the next node is wanted.
    """
    visited = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if key(node) not in visited:
            visited.add(key(node))
            yield node
            pending += neighbours(node)


def producers(operation: Any) -> list:
    """Return the operations of a graph that an operation directly waits for."""
    # Control inputs, too: what an operation waits for has to be there before.
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
