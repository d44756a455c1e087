"""The collectives for whatever graph a script builds: those of ``collectives`` and ``gradients``, and in a graph for a
session an operation that calls them eagerly when its turn has come (``turns``).

Arguments, results and errors are those of the functions of the same names there. In a session's graph errors that need
the data, and those of the other ranks, are errors of ``session.run`` with the same text, and only sums and means of
``all_reduce`` and ``reduce_list`` have gradients, as on Ascend.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device.cluster.runtime import Runtime
from npu_device.collectives import all_gather as _all_gather
from npu_device.collectives import all_reduce as _all_reduce
from npu_device.collectives import all_to_all_v as _all_to_all_v
from npu_device.collectives import all_to_all_vc as _all_to_all_vc
from npu_device.collectives import broadcast as _broadcast
from npu_device.collectives import dtypes, shapes
from npu_device.collectives import receive as _receive
from npu_device.collectives import reduce as _reduce
from npu_device.collectives import reduce_scatter as _reduce_scatter
from npu_device.collectives import send as _send
from npu_device.collectives.agreement import Call, agreed, describe
from npu_device.collectives.group import Group
from npu_device.collectives.pair import pair_of
from npu_device.gradients import reduce as _lists
from npu_device.gradients.reduce import Gradient, Reduction
from npu_device.gradients.segments import cut
from npu_device.profiling.steps import untraced
from npu_device.sessions.outside import in_session_graph, run_outside
from npu_device.sessions.turns import ALONE, turns_of

_Tensors = Sequence[tf.Tensor]

_LARGEST = (1 << 31) - 1


def all_reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """See ``collectives.all_reduce``."""
    if not in_session_graph():
        return _all_reduce.all_reduce(runtime, tensor, reduction, group)
    [reduced] = reduce_list(runtime, [tensor], Reduction(reduction, fusion=0), group)
    return reduced


def reduce_list(runtime: Runtime, values: Sequence[Gradient], reduction: Reduction, group: Group) -> list[Gradient]:
    """See ``gradients.reduce``. In a session's graph too each segment is an operation that starts when its own tensors
    are there.
    """
    if not in_session_graph():
        return _lists.reduce_list(runtime, values, reduction, group)
    results: list[Gradient] = [None] * len(values)
    segments = cut(values, reduction.kind, reduction.fusion, group.name)
    seen = _lists.traced(runtime, values, segments, reduction, group)
    with seen as trace, _all_first(values, reduction):
        for positions in segments:
            segment = [values[position] for position in positions]
            for position, tensor in zip(positions, _reduce_segment(runtime, segment, reduction, group)):
                results[position] = tensor
            trace.segment([results[position] for position in positions])
        for position, value in enumerate(values):
            if isinstance(value, tf.IndexedSlices):
                results[position] = _reduce_slices(runtime, value, reduction, group)
                trace.segment([results[position]])
    return trace.recorded_with(results)


def _all_first(values: Sequence[Gradient], reduction: Reduction) -> Any:
    """Without overlap nothing is sent before everything is there."""
    if reduction.overlap:
        return contextlib.nullcontext()
    return tf.control_dependencies([value for value in values if isinstance(value, tf.Tensor)])


def _reduce_segment(runtime: Runtime, tensors: _Tensors, reduction: Reduction, group: Group) -> list[tf.Tensor]:
    specs = []
    for tensor in tensors:
        _all_reduce.require_reduction("all_reduce", tensor.dtype, reduction.kind)
        mean = reduction.kind == "mean"
        specs.append(tf.TensorSpec(tensor.shape, dtypes.mean_dtype(tensor.dtype) if mean else tensor.dtype))
    call = _describe_reduction(tensors, reduction)

    def eagerly(*segment: tf.Tensor) -> list[tf.Tensor]:
        whole = Reduction(reduction.kind, fusion=2, fusion_id=0, compression=reduction.compression)
        with untraced(), agreed(runtime, group, call, segment):
            return _lists.reduce_list(runtime, segment, whole, group)

    def backward(upstream: _Tensors) -> list[tf.Tensor]:
        if reduction.kind not in ("sum", "mean"):
            raise LookupError(
                f"all_reduce has no gradient for reduction {reduction.kind!r}; it is differentiable for 'sum' and "
                "'mean'"
            )
        return _reduce_segment(runtime, upstream, reduction, group)

    together = 1 + zlib.crc32(repr(reduction).encode()) % _LARGEST if reduction.joins_calls else ALONE
    return _operation(runtime, group, call, tensors, specs, eagerly, backward, together)


def _reduce_slices(runtime: Runtime, slices: tf.IndexedSlices, reduction: Reduction, group: Group) -> tf.IndexedSlices:
    dense_shape = slices.dense_shape
    parts = [slices.values, slices.indices] + ([] if dense_shape is None else [dense_shape])
    call = _describe_reduction([slices], reduction)

    def eagerly(*parts: tf.Tensor) -> list[tf.Tensor]:
        mine = tf.IndexedSlices(*parts)
        with untraced(), agreed(runtime, group, call, [mine]):
            reduced: Any = _lists.reduce_list(runtime, [mine], reduction, group)[0]
        return [reduced.values, reduced.indices]

    specs = [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(slices.values.shape[1:]), slices.values.dtype),
        tf.TensorSpec([None], slices.indices.dtype),
    ]
    return tf.IndexedSlices(*_operation(runtime, group, call, parts, specs, eagerly), dense_shape)


def _describe_reduction(values: Sequence[Any], reduction: Reduction) -> Call:
    return describe("all_reduce", values, reduction=reduction.kind, compression=reduction.compression or "none")


def broadcast(runtime: Runtime, tensors: _Tensors, root_rank: int, group: Group) -> list[tf.Tensor]:
    """See ``collectives.broadcast``."""
    if not in_session_graph() or not tensors:
        return _broadcast.broadcast(runtime, tensors, root_rank, group)
    shapes.require_member("root_rank", root_rank, group)
    _require_bits(tensors)
    return _move(
        runtime,
        group,
        describe("broadcast", tensors, root_rank=root_rank),
        tensors,
        [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors],
        lambda *values: _broadcast.broadcast(runtime, values, root_rank, group),
    )


def all_gather(runtime: Runtime, tensor: tf.Tensor, group: Group) -> tf.Tensor:
    """See ``collectives.all_gather``."""
    if not in_session_graph():
        return _all_gather.all_gather(runtime, tensor, group)
    shapes.require_first_dimension("all_gather", tensor)
    _require_bits([tensor])
    [gathered] = _move(
        runtime,
        group,
        describe("all_gather", [tensor]),
        [tensor],
        [_with_rows(tensor, lambda rows: rows * group.size)],
        lambda value: [_all_gather.all_gather(runtime, value, group)],
    )
    return gathered


def reduce(runtime: Runtime, tensor: tf.Tensor, reduction: str, root_rank: int, group: Group) -> tf.Tensor:
    """See ``collectives.reduce``."""
    if not in_session_graph():
        return _reduce.reduce(runtime, tensor, reduction, root_rank, group)
    shapes.require_member("root_rank", root_rank, group)
    _all_reduce.require_reduction("reduce", tensor.dtype, reduction)
    dtype = dtypes.mean_dtype(tensor.dtype) if reduction == "mean" else tensor.dtype
    [reduced] = _move(
        runtime,
        group,
        describe("reduce", [tensor], reduction=reduction, root_rank=root_rank),
        [tensor],
        [tf.TensorSpec(tensor.shape, dtype)],
        lambda value: [_reduce.reduce(runtime, value, reduction, root_rank, group)],
    )
    return reduced


def reduce_scatter(runtime: Runtime, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """See ``collectives.reduce_scatter``."""
    if not in_session_graph():
        return _reduce_scatter.reduce_scatter(runtime, tensor, reduction, group)
    _all_reduce.require_reduction("reduce_scatter", tensor.dtype, reduction)
    shapes.in_blocks("reduce_scatter", tensor, group)
    [block] = _move(
        runtime,
        group,
        describe("reduce_scatter", [tensor], reduction=reduction),
        [tensor],
        [_with_rows(tensor, lambda rows: rows // group.size)],
        lambda value: [_reduce_scatter.reduce_scatter(runtime, value, reduction, group)],
    )
    return block


def send(runtime: Runtime, tensor: tf.Tensor, tag: int, destination: int, group: Group) -> Any:
    """See ``collectives.send``."""
    if not in_session_graph():
        return _send.send(runtime, tensor, tag, destination, group)
    _require_bits([tensor])

    def eagerly(value: tf.Tensor) -> list[tf.Tensor]:
        _send.send(runtime, value, tag, destination, group)
        return [tf.constant(0)]

    [sent] = _move(
        runtime,
        pair_of(group, group.rank, destination, tag),
        describe("send and receive", [tensor], tag=tag),
        [tensor],
        [tf.TensorSpec([], tf.int32)],
        eagerly,
    )
    return sent.op


def receive(runtime: Runtime, shape: Any, dtype: tf.DType, tag: int, source: int, group: Group) -> tf.Tensor:
    """See ``collectives.receive``."""
    if not in_session_graph():
        return _receive.receive(runtime, shape, dtype, tag, source, group)
    like = tf.TensorSpec(shape, dtype)
    _require_bits([like])
    [received] = _move(
        runtime,
        pair_of(group, source, group.rank, tag),
        describe("send and receive", [like], tag=tag),
        [tf.constant(0)],
        [like],
        lambda _: [_receive.receive(runtime, like.shape, dtype, tag, source, group)],
        agree_on=lambda _: [like],
    )
    return received


def all_to_all_v(
    runtime: Runtime,
    data: tf.Tensor,
    send_counts: Any,
    send_displacements: Any,
    recv_counts: Any,
    recv_displacements: Any,
    group: Group,
) -> tf.Tensor:
    """See ``collectives.all_to_all_v``."""
    if not in_session_graph():
        return _all_to_all_v.all_to_all_v(
            runtime, data, send_counts, send_displacements, recv_counts, recv_displacements, group
        )
    numbers = [send_counts, send_displacements, recv_counts, recv_displacements]

    def eagerly(value: tf.Tensor, sent: Any, sent_from: Any, received: Any, received_at: Any) -> tf.Tensor:
        return _all_to_all_v.all_to_all_v(runtime, value, sent, sent_from, received, received_at, group)

    return _all_to_all("all_to_all_v", runtime, data, numbers, eagerly, group)


def all_to_all_vc(runtime: Runtime, data: tf.Tensor, send_count_matrix: Any, group: Group) -> tf.Tensor:
    """See ``collectives.all_to_all_vc``."""
    if not in_session_graph():
        return _all_to_all_vc.all_to_all_vc(runtime, data, send_count_matrix, group)
    return _all_to_all(
        "all_to_all_vc",
        runtime,
        data,
        [send_count_matrix],
        lambda value, matrix: _all_to_all_vc.all_to_all_vc(runtime, value, matrix, group),
        group,
    )


def _all_to_all(
    operation: str,
    runtime: Runtime,
    data: tf.Tensor,
    numbers: Sequence[Any],
    eagerly: Callable[..., tf.Tensor],
    group: Group,
) -> tf.Tensor:
    shapes.require_vector(operation, data)
    _require_bits([data])
    [received] = _move(
        runtime,
        group,
        describe(operation, [data], ragged=True),
        [data, *(tf.cast(tf.convert_to_tensor(value), tf.int64) for value in numbers)],
        [tf.TensorSpec([None], data.dtype)],
        lambda *values: [eagerly(*values)],
        agree_on=lambda *values: values[:1],
    )
    return received


def _require_bits(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        dtypes.require_bits(tensor.dtype)


def _with_rows(tensor: tf.Tensor, rows: Callable[[int], int]) -> tf.TensorSpec:
    """What a tensor is with another first dimension."""
    if tensor.shape.rank is None:
        return tf.TensorSpec(None, tensor.dtype)
    first, *others = tensor.shape.as_list()
    return tf.TensorSpec([None if first is None else rows(first), *others], tensor.dtype)


def _move(
    runtime: Runtime,
    group: Group,
    call: Call,
    tensors: _Tensors,
    specs: Sequence[tf.TensorSpec],
    function: Callable[..., Sequence[tf.Tensor]],
    agree_on: Callable[..., Sequence[Any]] = lambda *values: values,
) -> list[tf.Tensor]:
    """An operation without gradients; ``agree_on`` picks from its inputs what the ranks compare."""

    def eagerly(*values: tf.Tensor) -> Sequence[tf.Tensor]:
        with agreed(runtime, group, call, agree_on(*values)):
            return function(*values)

    return _operation(runtime, group, call, tensors, specs, eagerly)


def _operation(
    runtime: Runtime,
    group: Group,
    call: Call,
    tensors: _Tensors,
    specs: Sequence[tf.TensorSpec],
    eagerly: Callable[..., Sequence[tf.Tensor]],
    backward: Callable[[_Tensors], list[tf.Tensor]] | None = None,
    together: int = ALONE,
) -> list[tf.Tensor]:
    """Add a collective to the session's graph.

    Args:
        runtime: the running cluster.
        group: who takes part.
        call: what the ranks agree on.
        tensors: its inputs.
        specs: shapes and dtypes of its results.
        eagerly: the collective; eager tensors in and out.
        backward: makes the gradients of the inputs out of those of the results; None when there are none.
        together: see ``turns``.
    """
    number = _next_number(group)
    turns = turns_of(runtime, group)

    def run(*arrays: Any) -> list[Any]:
        return turns.take(number, call, arrays, eagerly, together)

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        if backward is None:
            raise LookupError(f"{call.operation} has no gradient in a session's graph, as on Ascend")
        return backward(upstream)

    @tf.custom_gradient
    def differentiable(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        return run_outside(run, inputs, specs), gradient

    return list(differentiable(*tensors))


_made: weakref.WeakKeyDictionary[tf.Graph, Counter[Group]] = weakref.WeakKeyDictionary()


def _next_number(group: Group) -> int:
    """How many collectives of the group the graph has so far; scripts build the same graph on each rank."""
    with tf.init_scope():  # out of functions, branches and loops
        graph = tf.compat.v1.get_default_graph()
    counter = _made.setdefault(graph, Counter())
    counter[group] += 1
    return counter[group]
