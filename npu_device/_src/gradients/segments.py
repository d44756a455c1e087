"""Cut a list of tensors by the split strategy into segments that travel together, in the order of their production.

Index 0 of the split strategy is the gradient that backward produces first. In a graph, that is the one that depends on
the fewest operations: backward starts at the loss, so the gradient of each further layer depends on everything that the
layers above it needed. Counting dependencies, rather than the position in the list or the order of creation, is right
for branches, for layers used twice, for frozen layers, and for gradients that were scaled or clipped one by one.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.split_strategy import firsts_and_lasts, log_once, segment_result, segments


def production_order(tensors: Sequence[Any]) -> list[int]:
    """Return positions in the list, in the order of production.

    Ties count from the end of the list, since backward runs through the variables from the last to the first.
    """
    dense = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
    last_first = list(reversed(range(len(dense))))
    if tf.executing_eagerly():
        made = [compat.number_of(tensor) for tensor in dense]
        if made == sorted(made):  # re-created in list order, by a comprehension for instance
            return last_first
        return sorted(last_first, key=lambda position: made[position])
    needed = _operations_needed([tensor.op for tensor in dense])
    return sorted(last_first, key=lambda position: needed[position])


def producers(operation: tf.Operation) -> list[tf.Operation]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _operations_needed(targets: Sequence[tf.Operation]) -> list[int]:
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


_log = logging.getLogger("npu_device")
_MAX_REMEMBERED = 1000


class FirstOrders(dict[tuple[str, ...], list[int]]):
    """The order of production in the first graph of each function; a part of the job."""


def cut(first: FirstOrders, tensors: Sequence[Any], reduction: str, fusion: int, group: str) -> list[list[int]]:
    """Cut a list of tensors into segments: positions of dense tensors of one dtype each. Anything else is left out.

    Fusion 0 gives every tensor a segment of its own, 1 cuts sums and means by the split strategy of the group, 2 makes
    one segment per dtype. A tensor whose size isn't known before the graph runs travels alone; with 2, the last such
    one travels with the others. Raises ValueError if the strategy doesn't fit the number of gradients.
    """
    buckets: dict[tf.DType, list[int]] = {}
    alone: list[list[int]] = []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, tf.Tensor):
            continue
        if fusion == 0 or (fusion == 1 and not tensor.shape.is_fully_defined()):
            alone.append([position])
        else:
            buckets.setdefault(tensor.dtype, []).append(position)
    for positions in buckets.values():
        for position in [position for position in positions if not tensors[position].shape.is_fully_defined()][:-1]:
            positions.remove(position)
            alone.append([position])
    found: list[list[int]] = []
    for dtype, positions in buckets.items():
        order = positions
        if len(positions) > 1:
            order = [positions[i] for i in _order(first, [tensors[position] for position in positions], group)]
        if len(order) == 1 or fusion == 2 or reduction not in ("sum", "mean"):
            found.append(order)
            continue
        sizes = [tensors[position].shape.num_elements() * dtype.size for position in order]
        ends = segments(sizes, group)
        if _log.isEnabledFor(logging.INFO):
            log_once(logging.INFO, f"{segment_result(ends)} of {len(order)} {dtype.name} gradients in group {group!r}")
        found.extend(order[first : last + 1] for first, last in firsts_and_lasts(ends))
    return found + alone


def _order(first: FirstOrders, tensors: Sequence[tf.Tensor], group: str) -> list[int]:
    """Return the order of production; in a function that is traced again, that of its first graph.

    One rank alone may trace again, for instance when its last batch is smaller than the others'. In a graph for an
    unknown batch size, gradients depend on more operations, and so might come in another order than on the other ranks.
    """
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, compat.FuncGraph):
        return production_order(tensors)
    name = re.sub(r"\d+", "", graph.name)
    key = (name, group, *(f"{tensor.dtype.name}{tensor.shape}" for tensor in tensors))
    if key not in first:
        if len(first) == _MAX_REMEMBERED:
            first.clear()
        first[key] = production_order(tensors)
    return first[key]
