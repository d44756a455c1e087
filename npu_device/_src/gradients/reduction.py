"""The reduction of a list of tensors, dense and sparse: cut into segments, one collective each, handed back in order.

Results are marked: whoever applies gradients is asked later whether they were reduced.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import tensorflow as tf

from npu_device._src.collectives.agreed_engine import AgreedEngine, require_differentiable
from npu_device._src.collectives.collective import Collective
from npu_device._src.collectives.dtypes import reduced_dtype
from npu_device._src.collectives.engine_text import say_that_float16_may_be_slow
from npu_device._src.collectives.graph import one_or_several, origin
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import REDUCTIONS, digest_of, require_reduction
from npu_device._src.gradients.segments import FirstOrders, cut
from npu_device._src.gradients.sparse_rows import TableRows, add_up_slices
from npu_device._src.gradients.split_strategy import MAX_SEGMENTS
from npu_device._src.options import global_options
from npu_device._src.trace.trace import Tracer, traced_reduction

Owners = Optional[Sequence[int]]
"""The rank of the group that owns each tensor of a list, if each has an owner."""
Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]
Segments = Sequence[Sequence[int]]
"""Positions of tensors that travel together."""
_LARGEST_FUSION_ID = 0x7FFFFFFF
WIRE_DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}
_TAPE = "gradient_tape/"  # prefix of the names of operations that compute gradients
compared_with_one_process = threading.Event()
"""Set where steps are compared with those of one process: values are sent uncompressed, since compression rounds, and
gradients are reduced, and variables updated, in each step on each rank.
"""


@dataclass(frozen=True)
class ReductionOptions:
    """The settings of the reduction of a list."""

    reduction: str
    # 0 sends each tensor alone, 1 cuts by the split strategy, 2 makes one segment per dtype.
    fusion: int = 1
    fusion_id: int = -1  # any number with ``fusion=0``, -1 with 1, from 0 with 2
    # The 16 bits that are sent of float32 and float64, which are added up in their own dtype.
    compression: str | None = None
    # Add up the rows of ``tf.IndexedSlices`` that have the same index, where their user does so anyway.
    adds_rows: bool = False
    keys: tuple[str, ...] = ()  # keys of the dictionaries in which the values came

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction {self.reduction!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}"
            )
        check_fusion(self.fusion, self.fusion_id)
        if self.compression is not None and self.compression not in WIRE_DTYPES:
            raise ValueError(
                f"compression {self.compression!r} is unknown; expected 'fp16', 'bf16' or None"
            )
        if self.compression is not None and self.reduction not in ("sum", "mean"):
            raise ValueError(
                f"compression works with sum and mean only; found reduction {self.reduction!r}"
            )

    @property
    def wire(self) -> tf.DType | None:
        """Return the dtype in which float32 and float64 are sent; None for their own."""
        if compared_with_one_process.is_set() or self.compression is None:
            return None
        return WIRE_DTYPES[self.compression]


def keys_of(values: Any) -> tuple[str, ...]:
    """Return the keys of the dictionaries in a nested structure, in the order of ``tf.nest.flatten``."""
    keys: list[str] = []
    if isinstance(values, Mapping):
        for key in sorted(values):
            keys += [str(key), *keys_of(values[key])]
    elif isinstance(values, (list, tuple)):
        for inner in values:
            keys += keys_of(inner)
    return tuple(keys)


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
        raise ValueError(
            f"fusion_id {fusion_id!r} does not go with fusion 2; expected 0 to {_LARGEST_FUSION_ID}"
        )


def check_fusion_0_or_2(collective: str, fusion: int, fusion_id: int) -> None:
    if fusion not in (0, 2):
        raise ValueError(
            f"{collective}: fusion {fusion!r} is unknown; expected 0 (alone) or 2 (together)"
        )
    check_fusion(fusion, fusion_id)


def reduce_list(
    job: Job,
    tensors: Sequence[Gradient],
    options: ReductionOptions,
    group: Group,
    owners: Owners = None,
) -> list[Gradient]:
    """Reduce a list of tensors over a group.

    ``tf.IndexedSlices`` may have a different number of rows on each rank, and ``None`` stays. The collective of a
    segment depends only on its own tensors, so it starts as soon as backward has produced them.

    With ``owners``, the rank of the group to which each value belongs, a rank gets only its own results, and None for
    other tensors; see ``Engines.has_owners``.
    """
    tensors = list(map(_to_tensor, tensors))
    tracer = None
    # Only gradients are summed or averaged; a trace has no other reductions.
    if options.reduction in ("mean", "sum"):
        tracer = job.component(Tracer)
    if options.compression == "fp16":
        say_that_float16_may_be_slow(job, group)
    segments, calls = _cut(job, tensors, options, group)
    reduced: list[Gradient] = [None] * len(tensors)
    # Without hcom_parallel nothing is sent before everything is there.
    waits_for_all = not tf.executing_eagerly() and not global_options().hcom_parallel.typed
    with contextlib.ExitStack() as context:
        trace = None
        if tracer is not None:
            trace = context.enter_context(
                traced_reduction(tracer, tensors, segments, job, group, waits_for_all, options.wire)
            )
        if waits_for_all:
            dense = [tensor for tensor in tensors if isinstance(tensor, tf.Tensor)]
            context.enter_context(tf.control_dependencies(dense))
        for positions, segments_here in calls:
            tensors_here = [tensors[position] for position in positions]
            owners_here = owners and [owners[position] for position in positions]
            reduction = ListReduction(job, tensors_here, segments_here, options, group, owners_here)
            for position, reduced_here in zip(positions, reduction.collective().run(job)):
                reduced[position] = _with_shape_of(tensors[position], reduced_here)
        if trace is not None:
            for segment in segments:
                trace.segment(_own_or_last(segment, reduced, tensors))
    if trace is not None:
        reduced = trace.recorded_with(reduced)
    mark_reduced(job, reduced)
    return reduced


def _to_tensor(gradient: Any) -> Gradient:
    """Return as a tensor what optimizers take for a gradient, too: a variable that adds them up, an array of numpy."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    # The quick way for eager steps; a function captures an eager tensor below.
    if isinstance(gradient, tf.Tensor) and tf.executing_eagerly():
        return gradient
    return tf.convert_to_tensor(gradient)


def _cut(
    job: Job, tensors: Sequence[Gradient], options: ReductionOptions, group: Group
) -> tuple[Segments, list[tuple[Sequence[int], Segments]]]:
    """Cut a list by the split strategy into segments, and divide it among calls: the positions of each in the list, and
    its segments of dense tensors among the tensors there.
    """
    # A single dense tensor, the usual ``all_reduce``, needs no order.
    if len(tensors) == 1 and isinstance(tensors[0], tf.Tensor):
        return [[0]], [([0], [[0]])]
    orders = job.component_or_new(FirstOrders)
    segments = cut(orders, tensors, options.reduction, options.fusion, group.name)
    call = (range(len(tensors)), segments)
    # A segment that is a call of its own has all of its tensors in one segment.
    calls: list = [(segment, [range(len(segment))]) for segment in segments]
    # Each sparse tensor is reduced by itself.
    positions = enumerate(tensors)
    alone = [[position] for position, tensor in positions if isinstance(tensor, tf.IndexedSlices)]
    calls += [(segment, []) for segment in alone]
    return [*segments, *alone], one_or_several(call, calls)


def _with_shape_of(tensor: Gradient, reduced: Any) -> Any:
    """Return what a tensor was reduced to; rows get the dense shape of the tensor."""
    if not isinstance(tensor, tf.IndexedSlices):
        return reduced
    # A session returns a shape of which the graph knows nothing.
    return tf.IndexedSlices(reduced.values, reduced.indices, tensor.dense_shape)


def _own_or_last(
    segment: Sequence[int], reduced: Sequence[Gradient], tensors: Sequence[Gradient]
) -> list[Gradient]:
    """Return the results of a segment on this rank; if it has none, the last of the tensors that went in."""
    owned = [reduced[position] for position in segment if reduced[position] is not None]
    return owned or [tensors[segment[-1]]]


@dataclass
class ListReduction:
    """The reduction of a list whose segments are known, positions of dense tensors, as one call."""

    job: Job
    tensors: Sequence[Gradient]
    segments: Segments
    options: ReductionOptions
    group: Group
    owners: Owners = None

    def __post_init__(self) -> None:
        reduction = self.options.reduction
        self._sparse: dict[int, TableRows] = {}
        for position, tensor in enumerate(self.tensors):
            if isinstance(tensor, tf.IndexedSlices):
                if reduction not in ("sum", "mean"):
                    raise ValueError(
                        f"reduction {reduction!r} of IndexedSlices is not defined; expected 'sum' or 'mean', "
                        "or dense tensors (tf.convert_to_tensor)"
                    )
                self._sparse[position] = TableRows(tensor.indices)
            if tensor is not None:
                require_reduction("all_reduce", tensor.dtype, reduction)

    def collective(self) -> Collective:
        """Return the call that reduces the list; every rank of the group runs it."""
        # The arguments that have to be the same on all ranks.
        agreed = {
            "reduction": self.options.reduction,
            "segments": _summary(self.segments),
            "compression": self.options.compression or "none",
        }
        if self.options.keys:
            agreed["keys"] = ", ".join(self.options.keys)
        agreed.update(self._paths_of_rows())
        counts = [rows.counts for rows in self._sparse.values() if rows.counts is not None]
        inputs = [*self.tensors, *counts]
        gradient = None
        if self.segments:
            gradient = self._gradient
        name = "all_reduce"
        if self.owners is not None:
            name = "reduce_to_owners"
            agreed["owners"] = digest_of(self.owners)
        return Collective(
            name,
            self.group,
            self.tensors,
            self._reduce_by,
            inputs,
            self._specs,
            agreed,
            gradient=gradient,
            has_owners=self.owners is not None,
        )

    def _paths_of_rows(self) -> dict[str, str]:
        """Return what decides how rows travel, where it isn't the usual: another rank's graph may not know it."""
        paths = {}
        for position, rows in self._sparse.items():
            name = f"tensor_{position}"
            slices: Any = self.tensors[position]
            if self.options.adds_rows and slices.dense_shape is None:
                paths[name] = "without dense_shape"
            elif not self.options.adds_rows and rows.counts is not None:
                paths[name] = f"lookups with distinct rows: {rows.are_distinct}"
        return paths

    def _reduce_by(self, engine: AgreedEngine, *inputs: Any) -> list[Gradient]:
        """Reduce the list; after its values, the inputs are the counts of rows of each lookup, where they matter."""
        reduced: list[Gradient] = [None] * len(self.tensors)
        reduction = self.options.reduction
        wire = self.options.wire
        lists = [[inputs[position] for position in segment] for segment in self.segments]
        reduced_lists: Sequence[Sequence[Optional[tf.Tensor]]]
        if self.owners is None:
            reduced_lists = engine.all_reduce(lists, reduction, wire)
        else:
            owners = [[self.owners[position] for position in segment] for segment in self.segments]
            reduced_lists = engine.reduce_to_owners(lists, owners, reduction, wire)
        for segment, reduced_segment in zip(self.segments, reduced_lists):
            for position, tensor in zip(segment, reduced_segment):
                reduced[position] = tensor
        counts = iter(inputs[len(self.tensors) :])
        for position, rows in self._sparse.items():
            slices = inputs[position]
            if self.options.adds_rows:
                reduced[position] = add_up_slices(engine, slices, reduction, wire)
            else:
                reduced[position] = rows.gathered(engine, slices, reduction, wire, counts)
        return reduced

    def _gradient(self, upstream: Sequence[tf.Tensor]) -> list[Gradient]:
        require_differentiable("all_reduce", self.options.reduction)
        # The gradients of the results travel in the same segments.
        reduction = ListReduction(self.job, upstream, self.segments, self.options, self.group)
        return reduction.collective().run(self.job)

    def _specs(self) -> list[tf.TypeSpec | None]:
        return [_spec_of_result(tensor, self.options.reduction) for tensor in self.tensors]


def _spec_of_result(tensor: Gradient, reduction: str) -> tf.TypeSpec | None:
    if tensor is None:
        return None
    dtype = reduced_dtype(tensor.dtype, reduction)
    if isinstance(tensor, tf.Tensor):
        return tf.TensorSpec(tensor.shape, dtype)
    lengths = None
    if tensor.dense_shape is not None:
        lengths = tensor.dense_shape.dtype
    return tf.IndexedSlicesSpec(tensor.values.shape, dtype, tensor.indices.dtype, lengths)


def _summary(segments: Segments) -> str:
    """Return the number and lengths of the segments and a checksum of their content, for comparison."""
    # A single tensor can be cut in one way only.
    if len(segments) <= 1 and sum(map(len, segments)) <= 1:
        return str(len(segments))
    lengths = "+".join(map(str, map(len, segments[:MAX_SEGMENTS])))
    if len(segments) > MAX_SEGMENTS:
        lengths += "+…"
    return f"{len(segments)} ({lengths}, order {zlib.crc32(repr(segments).encode()):08x})"


def with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(tf.convert_to_tensor(gradient))


def weighted(gradient: Any, weight: Any) -> Any:
    return with_values(gradient, lambda rows: rows * tf.cast(weight, rows.dtype))


def all_finite(gradients: Sequence) -> tf.Tensor:
    """Return whether the gradients of this rank are finite: bool, shape []; ``None`` among them is ignored."""
    are_finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in dense_tensors(gradients)]
    return tf.reduce_all([True, *are_finite])


def with_nan_unless(agreed: tf.Tensor, gradients: Sequence) -> list:
    """Return gradients, of which one is NaN if the ranks haven't agreed that all are finite."""
    gradients = list(gradients)
    sizes = {}
    for position, gradient in enumerate(gradients):
        if gradient is not None:
            sizes[position] = dense_of(gradient).shape.num_elements() or sys.maxsize

    def nan_unless_agreed(values: tf.Tensor) -> tf.Tensor:
        return tf.where(agreed, values, float("nan"))

    if sizes:
        # NaN in one gradient is enough, and the smallest is the cheapest to replace.
        smallest = min(sizes, key=sizes.__getitem__)
        gradients[smallest] = with_values(gradients[smallest], nan_unless_agreed)
    return gradients


# The results of reductions


_IS_REDUCED = "_npu_is_reduced"
"""The attribute of a tensor that is the result of a reduction of this rank."""


def mark_reduced(job: Job, reduced: Iterable) -> None:
    """Count a reduction of this rank, and mark its results."""
    job.reductions += 1
    for tensor in dense_tensors(reduced):
        setattr(tensor, _IS_REDUCED, True)


def unreduced_among(gradients: Sequence) -> list:
    """Return the gradients that aren't results of a reduction or, in a function, computed from such only."""
    # An eager tensor doesn't tell what it was made of.
    if tf.executing_eagerly():
        return [gradient for gradient in gradients if not hasattr(dense_of(gradient), _IS_REDUCED)]
    origins: dict[tf.Graph, dict[str, set[str]]] = {}
    unreduced = []
    for gradient in gradients:
        tensor = dense_of(gradient)
        if _origins(tensor.graph, origins)[tensor.name] != {"sum"}:
            unreduced.append(gradient)
    return unreduced


def _origins(graph: Any, origins: dict[tf.Graph, dict[str, set[str]]]) -> dict[str, set[str]]:
    """Return, for each tensor of a graph, whether it is computed from reductions ("sum") and tapes ("tape")."""
    if graph in origins:
        return origins[graph]
    names: dict[str, set[str]] = {}
    # A placeholder of a function stands for a tensor outside.
    for outside, inside in getattr(graph, "captures", ()):
        if tf.is_symbolic_tensor(outside):
            names[inside.name] = _origins(outside.graph, origins)[outside.name]
    for operation in graph.get_operations():
        sources = set()
        # What a tape computes is a gradient of this rank, whatever it is computed from.
        if _TAPE in operation.name:
            sources = {"tape"}
        else:
            for tensor in operation.inputs:
                sources |= names.get(tensor.name, set())
        for output in operation.outputs:
            names.setdefault(output.name, sources)
            if hasattr(output, _IS_REDUCED):
                names[output.name] = {"sum"}
    origins[graph] = names
    return names


def dense_of(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


def dense_tensors(gradients: Iterable) -> list:
    """Return the tensors of gradients, those of rows if they are sparse, without ``None``."""
    return [dense_of(gradient) for gradient in gradients if gradient is not None]


def origin_of(tensor: Any) -> Any:
    """Return the tensor that a tensor of a graph is a copy of; an eager one itself."""
    if tf.is_symbolic_tensor(tensor):
        return origin(tensor)
    return tensor
