"""A backend's calls on tensors, for backends whose operations Python runs on arrays: programs behind two TensorFlow
operations.

In a tf.function each collective is a start, which passes the tensors' memory and never waits for other ranks, and a
finish, which waits. Starts run in the order of the program, also in loops, and so do finishes. Every rank starts in the
same order, so any number of threads suffices: the first operation that some rank hasn't started yet can't
be blocked by a finish. A list of segments is started as backward produces it and finished when all of it is started.

In eager mode both happen at once, without a TensorFlow operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, Optional, Protocol, Union

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.dtypes import reduced_dtype
from npu_device._src.collectives.engines.host.queue import Head, Program
from npu_device._src.collectives.engines.host.start_finish import Action, AllCalls, OnTensors, Operation
from npu_device._src.collectives.engines.host.stream import BufferPool, Stream
from npu_device._src.collectives.group import Group

_LARGE = 1 << 30


class Programs(Protocol):
    """The operations as programs on a channel of a backend.

    ``head`` is what the members compare before data moves, if they haven't agreed on the call.
    """

    def all_reduce(self, channel: Any, stream: Stream, result: np.ndarray, reduction: str, head: Head) -> Program:
        """Reduce a stream; ``result`` is as long as the stream, and may be of another dtype."""

    def reduce(
        self, channel: Any, stream: Stream, result: Optional[np.ndarray], reduction: str, root: int, head: Head
    ) -> Program:
        """Reduce a stream to the root, the only one with a ``result``."""

    def broadcast(self, channel: Any, stream: Stream, result: Optional[np.ndarray], root: int, head: Head) -> Program:
        """Send the root's stream into the ``result`` of all other members."""

    def all_gather(self, channel: Any, row: np.ndarray, result: np.ndarray, head: Head) -> Program:
        """Gather all members' rows, shape [n], into ``result``, shape [size, n]."""

    def all_to_all(self, channel: Any, rows: np.ndarray, result: np.ndarray, head: Head) -> Program:
        """Send row i of ``rows`` to member i, and receive row i of ``result`` from member i: both [size, n]."""


class ComparingPrograms(Programs, Protocol):
    """Programs whose members compare their heads."""

    def meet(self, channel: Any, head: Head) -> Program:
        """Exchange only the heads."""


class HostEngine:
    """A backend, as ``contract.Backend`` describes it.

    Args:
        programs: its programs.
        calls: how they run.
    """

    def __init__(self, programs: Programs, calls: AllCalls) -> None:
        self._programs = programs
        self._calls = calls

    def all_reduce(
        self,
        agreement: Agreement,
        segments: Sequence[Sequence[tf.Tensor]],
        reduction: str,
        group: Group,
        wire: tf.DType | None,
    ) -> list[list[tf.Tensor]]:
        """Reduce segments; see ``contract.Backend``."""
        program = self._programs.all_reduce
        return self._calls.run(
            agreement, group, [_reduction(program, segment, reduction, wire, gets=True) for segment in segments]
        )

    def reduce(
        self, agreement: Agreement, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        """Reduce tensors of one dtype to the root; see ``contract.ReducingBackend``."""
        program = partial(self._programs.reduce, root=root)
        given = _reduction(program, tensors, reduction, None, gets=group.rank == root)
        [results] = self._calls.run(agreement, group, [given])
        return results or [tf.cast(tensor, reduced_dtype(tensor.dtype, reduction)) for tensor in tensors]

    def broadcast(self, agreement: Agreement, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
        """Return the root's tensors on every rank."""
        program = partial(self._programs.broadcast, root=root)
        [received] = self._calls.run(agreement, group, [_broadcast(program, tensors, sends=group.rank == root)])
        return received if group.rank != root else [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
        """Return all ranks' rows on every rank: [n] in, [group.size, n] out."""
        return self._rows(agreement, lambda mine: partial(self._programs.all_gather, row=mine), row, group)

    def all_to_all(self, agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out."""
        return self._rows(agreement, lambda mine: partial(self._programs.all_to_all, rows=mine), rows, group)

    def _rows(self, agreement: Agreement, program: Callable[..., Any], tensor: tf.Tensor, group: Group) -> tf.Tensor:
        def prepare(arrays: list[np.ndarray]) -> Action:
            result = aligned_array((group.size, arrays[0].shape[-1]), arrays[0].dtype)
            return partial(program(arrays[0]), result=result), [result]

        output = tf.TensorSpec([group.size, tensor.shape[-1]], tensor.dtype)
        [[found]] = self._calls.run(agreement, group, [(Operation([output], bytes_of([tensor]), prepare), [tensor])])
        return found


class ComparingEngine(HostEngine):
    """A backend that compares calls, with their first data or alone."""

    def __init__(self, programs: ComparingPrograms, calls: AllCalls) -> None:
        super().__init__(programs, calls)
        self._meet = programs.meet

    def exchange_terms(self, agreement: Agreement, group: Group) -> list[tf.Tensor]:
        """Compare only the terms; return a tensor that is ready once all ranks agree."""
        action = self._meet, [np.array(True)]
        operation = Operation([tf.TensorSpec([], tf.bool)], 0, lambda _: action)
        return self._calls.run(agreement, group, [(operation, [])])[0]


# The parts of the calls: inputs, outputs, and how arrays become a program.


def _reduction(
    program: Callable[..., Program], tensors: Sequence[tf.Tensor], reduction: str, wire: tf.DType | None, gets: bool
) -> OnTensors:
    dtype = reduced_dtype(tensors[0].dtype, reduction)
    travels, given = (np.dtype(kind.as_numpy_dtype) for kind in (wire or tensors[0].dtype, dtype))

    def prepare(arrays: list[np.ndarray]) -> Action:
        stream = Stream([array.shape for array in arrays], travels, [array.reshape(-1) for array in arrays])
        flat, results = stream.results(_pool, given) if gets else (None, [])
        return partial(program, stream=stream, result=flat, reduction=reduction), results

    outputs = [tf.TensorSpec(tensor.shape, dtype) for tensor in tensors] if gets else []
    return Operation(outputs, bytes_of(tensors), prepare), tensors


def _broadcast(program: Callable[..., Program], tensors: Sequence[tf.Tensor], sends: bool) -> OnTensors:
    """Pack all dtypes into one stream of bytes. Unknown shapes are those of the rank's own tensors."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    known = all(spec.shape.is_fully_defined() for spec in specs)
    dtypes = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]

    def prepare(arrays: list[np.ndarray]) -> Action:
        shapes = [array.shape for array in arrays] if arrays else [tuple(spec.shape.as_list()) for spec in specs]
        sizes = [(math.prod(shape) * dtype.itemsize,) for shape, dtype in zip(shapes, dtypes)]
        flats = [array.reshape(-1).view(np.uint8) for array in arrays] if sends else []
        stream = Stream(sizes, np.dtype(np.uint8), flats)
        flat, parts = (None, []) if sends else stream.results(_pool, stream.dtype)
        results = [part.view(dtype).reshape(shape) for part, dtype, shape in zip(parts, dtypes, shapes)]
        return partial(program, stream=stream, result=flat), results

    return Operation([] if sends else specs, bytes_of(specs), prepare), tensors if sends or not known else []


def bytes_of(tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]) -> int:
    """Return the bytes of the tensors; one of unknown size counts as large."""
    sizes = (tensor.shape.num_elements() for tensor in tensors)
    return sum(_LARGE if size is None else size * tensor.dtype.size for size, tensor in zip(sizes, tensors))


_pool = BufferPool()


def aligned_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory for a result, which is reused when nothing refers to it any more."""
    return _pool.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
