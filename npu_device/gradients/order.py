"""The order in which backward produces the gradients of a list; what the split strategy's index 0 means.

In a graph the gradient that needs the fewest operations before it is there first: backward starts at the loss, so that
each further layer's gradient rests on everything that the layers above it have needed. Counting what a gradient rests
on, and not where it stands in the list or when its operation was made, is right for branches, for layers that are used
twice, for frozen ones, and for gradients that have been scaled or clipped one by one since.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def production_order(tensors: Sequence[Any]) -> list[int]:
    """Positions of the list in the order of production.

    Args:
        tensors: dense tensors or ``tf.IndexedSlices``, all of one graph or all eager.

    Returns:
        A permutation of the positions. What can't be told apart counts from the end of the list, since backward runs
        through the variables from the last to the first.
    """
    dense = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
    last_first = list(reversed(range(len(dense))))
    if tf.executing_eagerly():
        made = [tensor._id for tensor in dense]
        if made == sorted(made):  # made over again in list order, by a comprehension for instance
            return last_first
        return sorted(last_first, key=lambda position: made[position])
    needed = _operations_needed([tensor.op for tensor in dense])
    return sorted(last_first, key=lambda position: needed[position])


def producers(operation: tf.Operation) -> list[tf.Operation]:
    """What an operation rests on directly."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _operations_needed(targets: Sequence[tf.Operation]) -> list[int]:
    """How many operations each target rests on, directly or not, within its graph."""
    # Every operation gets a set of the targets that rest on it, as the bits of an integer.
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
    """All operations that the targets rest on; each after those that use it."""
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
