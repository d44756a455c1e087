"""The order in which backward produces the gradients of a list; index 0 of the split strategy is the first of them.

In a graph, the gradient that depends on the fewest operations is ready first: backward starts at the loss, so each
further layer's gradient depends on everything that the layers above it needed. Counting dependencies, rather than the
position in the list or the order of creation, is right for branches, for layers used twice, for frozen layers, and for
gradients that were scaled or clipped one by one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def production_order(tensors: Sequence[Any]) -> list[int]:
    """Return positions in the list, in the order of production.

    Args:
        tensors: dense tensors or ``tf.IndexedSlices``, all of one graph or all eager.

    Returns:
        A permutation of the positions. Ties count from the end of the list, since backward runs through the variables
        from the last to the first.
    """
    dense = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
    last_first = list(reversed(range(len(dense))))
    if tf.executing_eagerly():
        made = [tensor._id for tensor in dense]
        if made == sorted(made):  # re-created in list order, by a comprehension for instance
            return last_first
        return sorted(last_first, key=lambda position: made[position])
    needed = _operations_needed([tensor.op for tensor in dense])
    return sorted(last_first, key=lambda position: needed[position])


def producers(operation: tf.Operation) -> list[tf.Operation]:
    """Return the operations that an operation depends on directly."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _operations_needed(targets: Sequence[tf.Operation]) -> list[int]:
    """Count the operations that each target depends on, directly or not, within its graph."""
    # Every operation gets a set of the targets that depend on it, as the bits of an integer.
    resting: defaultdict[tf.Operation, int] = defaultdict(int)
    for position, target in enumerate(targets):
        resting[target] |= 1 << position
    sizes: Counter[int] = Counter()
    for operation in _consumers_first(targets):
        bits = resting[operation]
        sizes[bits] += 1
        for producer in producers(operation):
            resting[producer] |= bits
    return [sum(size for bits, size in sizes.items() if bits >> position & 1) for position in range(len(targets))]


def _consumers_first(targets: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Return all operations that the targets depend on, each after those that use it."""
    finished: list[tf.Operation] = []
    seen: set[tf.Operation] = set()
    for target in targets:
        path = [(target, iter(producers(target)))] if target not in seen else []
        seen.add(target)
        while path:
            operation, left = path[-1]
            for producer in left:
                if producer not in seen:
                    seen.add(producer)
                    path.append((producer, iter(producers(producer))))
                    break
            else:
                finished.append(operation)
                path.pop()
    return finished[::-1]
