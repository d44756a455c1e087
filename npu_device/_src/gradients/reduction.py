"""The reduction of a list of tensors, dense and sparse: cut into segments, one collective each, handed back in order.

The job remembers which tensors are results: whoever applies gradients is asked later whether they were reduced.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union, cast

import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.dtypes import reduced_dtype, sum_dtype, wire_dtype
from npu_device._src.collectives.graph import in_one_or_apart, origin
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.moves import gather, gather_ragged
from npu_device._src.collectives.operation import Operation
from npu_device._src.collectives.ops import REDUCTIONS, reduce_segments, require_differentiable, require_reduction
from npu_device._src.gradients.segments import FirstOrders, cut
from npu_device._src.gradients.split_strategy import MAX_SEGMENTS
from npu_device._src.options import global_options
from npu_device._src.trace.trace import Tracer, traced_reduction

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]
_LARGEST_FUSION_ID = 0x7FFFFFFF
WIRE_DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16, None: None}
_LATEST = 4096  # eager results that are remembered
_TAPE = "gradient_tape/"  # before the name of an operation that computes a gradient


@dataclass(frozen=True)
class ReductionOptions:
    """The settings of the reduction of a list."""

    kind: str
    fusion: int = 1  # 0 sends each tensor alone, 1 cuts by the split strategy, 2 makes one segment per dtype
    fusion_id: int = -1  # or with ``fusion=2`` any number from 0
    compression: str | None = None  # the 16 bits that are sent of float32 and float64, added up in their own dtype
    adds_rows: bool = False  # of ``tf.IndexedSlices``: add up those of the same index, where their user does so anyway

    def __post_init__(self) -> None:
        if self.kind not in REDUCTIONS:
            raise ValueError(f"reduction {self.kind!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}")
        check_fusion(self.fusion, self.fusion_id)
        if self.compression is not None and self.compression not in WIRE_DTYPES:
            raise ValueError(f"compression {self.compression!r} is unknown; expected 'fp16', 'bf16' or None")
        if self.compression is not None and self.kind not in ("sum", "mean"):
            raise ValueError(f"compression works with sum and mean only; found reduction {self.kind!r}")


def check_fusion(fusion: int, fusion_id: int) -> None:
    """Check the arguments of Ascend's all-reduce: fusion 1 goes with -1, 2 with 0 to 2**31 - 1, and 0 with anything."""
    if fusion not in (0, 1, 2):
        raise ValueError(
            f"fusion {fusion!r} is unknown; expected 0 (each tensor alone), 1 (by the split strategy) or 2 (together)"
        )
    if fusion == 1 and fusion_id != -1:
        raise ValueError(
            f"fusion_id {fusion_id!r} does not go with fusion 1; expected -1, or fusion=2 with an id of 0 to "
            f"{_LARGEST_FUSION_ID}"
        )
    if fusion == 2 and not 0 <= fusion_id <= _LARGEST_FUSION_ID:
        raise ValueError(f"fusion_id {fusion_id!r} does not go with fusion 2; expected 0 to {_LARGEST_FUSION_ID}")


def check_fusion_0_or_2(operation: str, fusion: int, fusion_id: int) -> None:
    if fusion not in (0, 2):
        raise ValueError(f"{operation}: fusion {fusion!r} is unknown; expected 0 (alone) or 2 (together)")
    check_fusion(fusion, fusion_id)


def reduce_list(job: Job, values: Sequence[Gradient], options: ReductionOptions, group: Group) -> list[Gradient]:
    """Reduce a list of tensors over a group.

    ``tf.IndexedSlices`` may have a different number of rows on each rank, and ``None`` stays. The collective of a
    segment depends only on its own tensors, so it starts as soon as backward has produced them.
    """
    segments, rows = [[0]], []
    # Positions in the list, and the segments among the values there.
    parts: list[tuple[Sequence[int], Sequence[Sequence[int]]]] = [([0], segments)]
    if len(values) != 1 or not isinstance(values[0], tf.Tensor):
        segments = cut(job.made(FirstOrders), values, options.kind, options.fusion, group.name)
        rows = [[position] for position, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        apart: list[Any] = [*((part, [range(len(part))]) for part in segments), *((part, []) for part in rows)]
        parts = in_one_or_apart((range(len(values)), segments), apart)
    results: list[Gradient] = [None] * len(values)
    # Without hcom_parallel nothing is sent before everything is there.
    waits_for_all = not tf.executing_eagerly() and not global_options().hcom_parallel.typed
    first = tf.control_dependencies([each for each in values if isinstance(each, tf.Tensor)]) if waits_for_all else None
    wire = WIRE_DTYPES[options.compression]
    tracer = job.part(Tracer) if options.kind in ("mean", "sum") else None
    traced = traced_reduction(tracer, values, segments, job, group, waits_for_all, wire) if tracer else None
    with traced or contextlib.nullcontext() as trace, first or contextlib.nullcontext():
        for positions, cuts in parts:
            reduced = _reduce_at_once(job, list(map(values.__getitem__, positions)), cuts, options, group)
            for position, result in zip(positions, reduced):
                results[position] = result
        for [position] in rows:
            sparse: Any = results[position]  # with what the graph knows of the shape, unlike a session's operation
            results[position] = tf.IndexedSlices(sparse.values, sparse.indices, cast(Any, values[position]).dense_shape)
        if trace is not None:
            for part in (*segments, *rows):
                trace.segment([results[position] for position in part])
    if trace is not None:
        results = trace.recorded_with(results)
    job.made(ReducedTensors).add(results)
    return results


def _reduce_at_once(
    job: Job, values: Sequence[Gradient], segments: Sequence[Sequence[int]], options: ReductionOptions, group: Group
) -> list[Gradient]:
    """Reduce a list whose segments are known, positions of dense tensors, as one operation; see ``ops``."""
    for value in values:
        if isinstance(value, tf.IndexedSlices) and options.kind not in ("sum", "mean"):
            raise ValueError(
                f"reduction {options.kind!r} of IndexedSlices is not defined; expected 'sum' or 'mean', or dense "
                "tensors (tf.convert_to_tensor)"
            )
        if value is not None:
            require_reduction("all_reduce", value.dtype, options.kind)

    wire = WIRE_DTYPES[options.compression]
    places = [place for place, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
    sparse = [_RowsOf(place, cast(tf.IndexedSlices, values[place]).indices) for place in places]
    counts = [part.counts for part in sparse if part.counts is not None]

    def body(agreement: Agreement, *inputs: Any) -> list[Gradient]:
        results: list[Gradient] = [None] * len(values)
        lists = [list(map(inputs.__getitem__, positions)) for positions in segments]
        for positions, tensors in zip(segments, reduce_segments(agreement, lists, options.kind, group, wire)):
            for position, tensor in zip(positions, tensors):
                results[position] = tensor
        own_counts = iter(inputs[len(values) :])
        for part in sparse:
            slices = inputs[part.position]
            if options.adds_rows:
                results[part.position] = _add_up_slices(agreement, slices, options.kind, group, wire)
                continue
            dtype = reduced_dtype(slices.dtype, options.kind)
            gathered = _gather_slices(agreement, slices, sum_dtype(dtype), group, wire)
            if part.counts is not None:
                gathered = part.as_in_one_process(agreement, gathered, next(own_counts), group)
            rows = gathered.values / group.size if options.kind == "mean" else gathered.values
            results[part.position] = tf.IndexedSlices(tf.cast(rows, dtype), gathered.indices, slices.dense_shape)
        return results

    def gradient(upstream: Sequence[tf.Tensor]) -> list[Gradient]:
        require_differentiable("all_reduce", options.kind)
        return _reduce_at_once(job, upstream, segments, options, group)

    def results() -> list[tf.TypeSpec | None]:
        return [_spec_of_result(value, options.kind) for value in values]

    compression = options.compression or "none"
    same = {"reduction": options.kind, "segments": _summary(segments), "compression": compression}
    backward = gradient if segments else None
    inputs = [*values, *counts]
    operation = Operation("all_reduce", group, values, body, inputs, results=results, same=same, gradient=backward)
    reduced: list[Gradient] = operation.run(job)
    return reduced


def _spec_of_result(value: Gradient, kind: str) -> tf.TypeSpec | None:
    if value is None:
        return None
    dtype = reduced_dtype(value.dtype, kind)
    if isinstance(value, tf.Tensor):
        return tf.TensorSpec(value.shape, dtype)
    lengths = None if value.dense_shape is None else value.dense_shape.dtype
    return tf.IndexedSlicesSpec(value.values.shape, dtype, value.indices.dtype, lengths)


def _summary(segments: Sequence[Sequence[int]]) -> str:
    """Return the number and lengths of the segments and a checksum of their content, for comparison."""
    if len(segments) <= 1 and sum(map(len, segments)) <= 1:
        return str(len(segments))
    lengths = "+".join(map(str, map(len, segments[:MAX_SEGMENTS])))
    more = "+…" if len(segments) > MAX_SEGMENTS else ""
    return f"{len(segments)} ({lengths}{more}, order {zlib.crc32(repr(segments).encode()):08x})"


# ``tf.IndexedSlices``: the rows of all ranks, or sums of them, gathered or taken from a dense sum

# In one process, the gradient of a table has a row for each time that the batch looks it up. What computes with rows
# (the norm of a gradient, an optimizer of Keras 3 that squares each) must see those rows, so they are gathered as they
# are. Sums move fewer bytes, and are right where rows of one index are added up next anyway.

# Operations one of whose outputs has no number twice. Lookups with a combiner use them: one row for each index, in one
# process for each of the whole batch.
_DISTINCT = {"Unique": 0, "UniqueV2": 0}
_DISTINCT.update({f"SparseSegment{kind}GradV2": 1 for kind in ("Sum", "Mean", "SqrtN")})


class _RowsOf:
    """The lookups in a table that a gradient at a position of a list has rows of, as the graph tells.

    Its body may run elsewhere: a session gives it eager tensors, which have no graph. Rows of an eager gradient count
    as those of one lookup.
    """

    def __init__(self, position: int, indices: Any) -> None:
        self.position = position
        lookups = list(_lookups(indices))
        self.is_distinct = [is_distinct for _, is_distinct in lookups]
        self.counts = None  # rows of each lookup on this rank, if some ranks' rows are to be added up
        if any(self.is_distinct):
            self.counts = tf.stack([tf.size(own) for own, _ in lookups])

    def as_in_one_process(
        self, agreement: Agreement, slices: tf.IndexedSlices, own_counts: tf.Tensor, group: Group
    ) -> tf.IndexedSlices:
        """Return the rows of all ranks by lookup, added up where a lookup has one for each index."""
        number = len(self.is_distinct)
        counts = tf.reshape(gather(agreement, own_counts[tf.newaxis], group), [-1])  # by rank, then by lookup
        values = tf.split(slices.values, counts, num=group.size * number)
        indices = tf.split(slices.indices, counts, num=group.size * number)
        merged = []
        for place, is_distinct in enumerate(self.is_distinct):
            rows = tf.concat(values[place::number], 0), tf.concat(indices[place::number], 0)
            merged.append(_add_up_duplicates(*rows) if is_distinct else rows)
        return tf.IndexedSlices(*(tf.concat(parts, 0) for parts in zip(*merged)), slices.dense_shape)


def _lookups(indices: Any) -> Iterator[tuple[Any, bool]]:
    """Generate the indices of each lookup whose rows follow each other, and whether there is one row for each index."""
    tensor = indices
    while tf.is_symbolic_tensor(tensor):
        tensor = origin(tensor)
        if tensor.op.type == "ConcatV2":
            for part in tensor.op.inputs[:-1]:
                yield from _lookups(part)
            return
        if tensor.op.type not in ("Reshape", "Cast"):
            break
        tensor = tensor.op.inputs[0]
    yield indices, tf.is_symbolic_tensor(tensor) and _DISTINCT.get(tensor.op.type) == tensor.value_index


def _add_up_slices(
    agreement: Agreement, slices: tf.IndexedSlices, reduction: str, group: Group, wire: tf.DType | None
) -> tf.IndexedSlices:
    """Return the sum or mean of sparse gradients with one row for each index, whichever way they travel.

    The result is the same on every rank. Each rank adds up its own rows of the same index first. When the rows of all
    ranks would move more bytes than the dense tensor, they are taken from the dense sum.
    """
    dtype = reduced_dtype(slices.values.dtype, reduction)
    values, indices = _add_up_duplicates(slices.values, slices.indices)

    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        # One row per index, as in the dense table: a norm over the rows must not depend on how they were reduced.
        everybody = tf.cast(_gather_rows(agreement, values, group, wire), sum_dtype(dtype))
        rows, row_indices = _add_up_duplicates(everybody, gather_ragged(agreement, indices, group))
        return tf.cast(rows / group.size if reduction == "mean" else rows, dtype), row_indices

    if slices.dense_shape is None:
        return tf.IndexedSlices(*gathered())
    length = tf.cast(slices.dense_shape[0], tf.int32)

    def dense() -> tuple[tf.Tensor, tf.Tensor]:
        table = tf.math.unsorted_segment_sum(values, indices, length)
        [[total]] = reduce_segments(agreement, [[table]], reduction, group, wire)
        # Not all rows: an optimizer may move those that it is given, even by a gradient of 0.
        present, _ = tf.unique(gather_ragged(agreement, indices, group))
        return tf.gather(total, present), present

    # Every rank knows all ranks' numbers of rows, so all decide alike. A gather sends the longest rank's rows to all
    # others; a ring all-reduce sends the dense tensor twice, less one n-th. Both gather the indices.
    counts = gather(agreement, tf.shape(values)[tf.newaxis, :1], group)
    rows, row_indices = tf.cond(tf.reduce_max(counts) * group.size > 2 * length, dense, gathered)
    rows.set_shape([None, *slices.values.shape[1:]])
    return tf.IndexedSlices(rows, row_indices, slices.dense_shape)


def _gather_slices(
    agreement: Agreement, slices: tf.IndexedSlices, dtype: tf.DType, group: Group, wire: tf.DType | None
) -> tf.IndexedSlices:
    """Return the rows of all ranks, those of rank 0 first, in a dtype."""
    rows = tf.cast(_gather_rows(agreement, slices.values, group, wire), dtype)
    return tf.IndexedSlices(rows, gather_ragged(agreement, slices.indices, group), slices.dense_shape)


def _gather_rows(agreement: Agreement, rows: tf.Tensor, group: Group, wire: tf.DType | None) -> tf.Tensor:
    return tf.cast(gather_ragged(agreement, tf.cast(rows, wire_dtype(rows.dtype, wire)), group), rows.dtype)


def _add_up_duplicates(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    unique, position = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, position, tf.size(unique)), unique


def with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(tf.convert_to_tensor(gradient))


def weighted(gradient: Any, weight: Any) -> Any:
    return with_values(gradient, lambda values: values * tf.cast(weight, values.dtype))


# The results of reductions


class ReducedTensors:
    """The results of the reductions of this rank; a part of the job."""

    def __init__(self) -> None:
        self.calls = 0
        self._eager: deque[weakref.ref[Any]] = deque(maxlen=_LATEST)
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()

    def add(self, results: Iterable[Any]) -> None:
        eager, self.calls = tf.executing_eagerly(), self.calls + 1
        for tensor in map(dense_of, results):
            if tensor is not None and eager:
                self._eager.append(weakref.ref(tensor))
            elif tensor is not None:
                self._graphs.setdefault(tensor.graph, set()).add(tensor.name)

    def missing_in(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients that aren't results of a reduction or, in a function, computed from such only."""
        if tf.executing_eagerly():
            results = {id(result) for reference in self._eager if (result := reference()) is not None}
            return [gradient for gradient in gradients if id(dense_of(gradient)) not in results]
        origins: dict[tf.Graph, dict[str, set[str]]] = {}
        return [one for one in gradients if self._origins(dense_of(one).graph, origins)[dense_of(one).name] != {"sum"}]

    def _origins(self, graph: Any, known: dict[tf.Graph, dict[str, set[str]]]) -> dict[str, set[str]]:
        """Return, for each tensor of a graph, whether it is computed from reductions ("sum") and tapes ("tape")."""
        if graph in known:
            return known[graph]
        found: dict[str, set[str]] = {}
        results, outside = self._graphs.get(graph, ()), {id(own): out for out, own in getattr(graph, "captures", ())}
        for operation in graph.get_operations():
            captured = [outside.get(id(each)) for each in operation.outputs if operation.type == "Placeholder"]
            origins = {"tape"} if _TAPE in operation.name else set()
            for each in [] if origins else [*operation.inputs, *filter(tf.is_symbolic_tensor, captured)]:
                origins |= (found if each.graph is graph else self._origins(each.graph, known)).get(each.name, set())
            found.update({each.name: {"sum"} if each.name in results else origins for each in operation.outputs})
        known[graph] = found
        return found


def dense_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def origin_of(tensor: Any) -> tuple[int, str]:
    """Return graph and name of the tensor that a tensor of a graph is a copy of; for an eager one its id."""
    if not tf.is_symbolic_tensor(tensor):
        return id(tensor), ""
    first = origin(tensor)
    return id(first.graph), first.name
