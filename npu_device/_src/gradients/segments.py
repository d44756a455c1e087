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

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.split_strategy import bounds, log_once, segment_result, segments


def production_order(tensors: Sequence[tf.Tensor]) -> list[int]:
    """Return positions in the list, in the order of production.

    Ties count from the end of the list, since backward runs through the variables from the last to the first.
    """
    from_the_end = list(reversed(range(len(tensors))))
    if tf.executing_eagerly():
        numbers = list(map(compat.number_of, tensors))
        # Tensors that a comprehension re-created, for instance, have numbers in the order of the list.
        if numbers == sorted(numbers):
            return from_the_end
    else:
        numbers = _operations_needed([tensor.op for tensor in tensors])
    return sorted(from_the_end, key=lambda position: numbers[position])


def _operations_needed(targets: Sequence[tf.Operation]) -> list[int]:
    """Return the number of operations on which each target depends."""
    # Every operation gets a set of the targets that depend on it, as the bits of an integer.
    dependents = defaultdict[tf.Operation, int](int)
    for position, target in enumerate(targets):
        dependents[target] |= 1 << position
    # Most operations share their set with others: they are counted by sets, and the sets by targets.
    counts = Counter[int]()
    graphs = {target.graph for target in targets}
    operations = [operation for graph in graphs for operation in graph.get_operations()]
    # Operations stand in the order in which they were created, so that those that use one come after it.
    for operation in reversed(operations):
        bits = dependents[operation]
        counts[bits] += 1
        for producer in compat.producers(operation):
            dependents[producer] |= bits
    numbers = []
    for position in range(len(targets)):
        numbers.append(sum(count for bits, count in counts.items() if bits >> position & 1))
    return numbers


_log = logging.getLogger("npu_device")
_MAX_REMEMBERED = 1000


class FirstOrders(dict[tuple[str, ...], list[int]]):
    """The order of production in the first graph of each function; a component of the job."""


def cut(
    orders: FirstOrders, tensors: Sequence, reduction: str, fusion: int, group: str
) -> list[list[int]]:
    """Cut a list of tensors into segments: positions of dense tensors of one dtype each. Anything else is left out.

    Fusion 0 gives every tensor a segment of its own, 1 cuts sums and means by the split strategy of the group, 2 makes
    one segment per dtype. A tensor whose size isn't known before the graph runs travels alone; with 2, the last such
    one travels with the others. Raises ValueError if the strategy doesn't fit the number of gradients.
    """
    by_dtype, alone = _by_dtype(tensors, fusion)
    joined = []
    for dtype, positions in by_dtype.items():
        ordered = positions
        if len(positions) > 1:
            order = _order(orders, [tensors[position] for position in positions], group)
            ordered = [positions[index] for index in order]
        if len(ordered) == 1 or fusion == 2 or reduction not in ("sum", "mean"):
            joined.append(ordered)
            continue
        # Sizes are in bytes, as percentages are of bytes.
        sizes = [tensors[position].shape.num_elements() * dtype.size for position in ordered]
        ends = segments(sizes, group)
        if _log.isEnabledFor(logging.INFO):
            gradients = f"{len(ordered)} {dtype.name} gradients"
            log_once(logging.INFO, f"{segment_result(ends)} of {gradients} in group {group!r}")
        joined.extend(ordered[low : high + 1] for low, high in bounds(ends))
    return joined + alone


def _by_dtype(tensors: Sequence, fusion: int) -> tuple[dict[tf.DType, list[int]], list[list[int]]]:
    """Return the positions of the tensors that may travel together, by dtype, and of those that travel alone."""
    by_dtype: dict[tf.DType, list[int]] = {}
    alone = []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, tf.Tensor):
            continue
        if fusion == 0 or (fusion == 1 and not tensor.shape.is_fully_defined()):
            alone.append([position])
        else:
            by_dtype.setdefault(tensor.dtype, []).append(position)
    for positions in by_dtype.values():
        unknown = [
            position for position in positions if not tensors[position].shape.is_fully_defined()
        ]
        # If only one size is unknown, the ranks still know where each tensor is.
        for position in unknown[:-1]:
            positions.remove(position)
            alone.append([position])
    return by_dtype, alone


def _order(orders: FirstOrders, tensors: Sequence[tf.Tensor], group: str) -> list[int]:
    """Return the order of production; in a function that is traced again, as in its first graph.

    One rank alone may trace again, for instance when its last batch is smaller than the others'. In a graph for an
    unknown batch size, gradients depend on more operations, and so might come in another order than on the other ranks.
    """
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, compat.FuncGraph):
        return production_order(tensors)
    # Numbers are left out, since TensorFlow gives each trace of a function its own.
    name = re.sub(r"\d+", "", graph.name)
    key = (name, group, *(f"{tensor.dtype.name}{tensor.shape}" for tensor in tensors))
    if key not in orders:
        if len(orders) == _MAX_REMEMBERED:
            # A script that makes functions without end must not fill memory.
            orders.clear()
        orders[key] = production_order(tensors)
    return orders[key]
