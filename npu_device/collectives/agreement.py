"""Before data moves the ranks agree on what they are about to do; calls that don't match are an error on all of them.

Every rank sends a fingerprint of its call (operation, positions, dtypes, shapes, reduction, root): in shared memory
beside the first data, and through TensorFlow in a gather of four integers that looks the same whatever the call is, so
that it matches even where the calls don't. Only when the fingerprints differ do the ranks tell each other the details,
through the key-value store. A list of gradients takes one agreement; TensorFlow's depends on none of them and is over
long before backward produces the first one.

Who waits for somebody that never comes is ``stall``'s part.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, TypeVar, cast

import numpy as np
import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.errors import ClusterError, PeerError
from npu_device.cluster.runtime import Runtime
from npu_device.collectives import backend
from npu_device.collectives.group import Group
from npu_device.collectives.shared_memory import backend as shared_memory
from npu_device.collectives.stall import graph_watch_of
from npu_device.collectives.tensorflow_backend import backend as tensorflow_backend

_DETAILS_SECONDS = 2.0
_PACKAGE = str(Path(__file__).parents[1])
_OTHERS = ("tensorflow", "keras", "tf_keras")
_UNKNOWN_LINE = "an unknown line"
_SHOWN_TENSORS = 3
_MAX_DIMENSIONS = 16


class MismatchError(PeerError):
    """The ranks of a group called different collectives; the text has one line a rank. A ``RuntimeError``."""


@dataclass(frozen=True)
class Call:
    """What one rank is about to do.

    Attributes:
        operation: name of the collective.
        kinds: one text for each value of a list, by position: its dtype and whether it is sparse, or ``None``.
        shapes: the values' shapes as far as they are known while tracing, for the message only; what is compared are
            the shapes of the running graph, since one rank may have traced with other knowledge than the rest.
        names: the values' names, for the message only; they may differ among ranks.
        details: whatever else has to be the same on all ranks: reduction, root, tag, …
        line: the line of the script that made the call, for the message only.
        ragged: the first dimension may differ among the ranks.
    """

    operation: str
    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    names: tuple[str, ...]
    details: tuple[tuple[str, str], ...]
    line: str
    ragged: bool = False

    @property
    def fingerprint(self) -> tuple[int, int]:
        """Two 32-bit numbers that are the same for calls that match."""
        return _fingerprint(self.operation, self.kinds, self.details)

    def row(self) -> dict[str, Any]:
        """The call as the others need it to say what differs."""
        return {
            "operation": self.operation,
            "tensors": [f"{kind} {shape}".rstrip() for kind, shape in zip(self.kinds, self.shapes)],
            "names": list(self.names),
            "details": dict(self.details),
            "line": self.line,
        }


@functools.lru_cache(maxsize=1024)
def _fingerprint(*parts: Any) -> tuple[int, int]:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, dtype="<i4")
    return int(first), int(second)


def describe(operation: str, values: Sequence[Any], ragged: bool = False, **details: Any) -> Call:
    """The description of a call.

    Args:
        operation: name of the collective.
        values: dense tensors, ``tf.IndexedSlices`` and ``None``.
        ragged: the first dimension may differ among the ranks.
        details: what else has to be the same on every rank.
    """
    return Call(
        operation,
        tuple(_kind(value) for value in values),
        tuple(_shape(_compared(value, ragged)) for value in values),
        tuple(_name(value) for value in values),
        tuple((key, str(value)) for key, value in details.items()),
        _user_line(),
        ragged,
    )


_state = threading.local()


@contextlib.contextmanager
def agreed(runtime: Runtime, group: Group, call: Call, values: Sequence[Any]) -> Iterator[None]:
    """Agree on a call with the group, and run the block after that.

    Args:
        runtime: the running cluster.
        group: who takes part.
        call: what this rank is about to do. Inside another agreement nothing more is asked.
        values: the call's tensors.

    Raises:
        MismatchError: the ranks' calls differ; in a tf.function it is raised as an error of the function, with the
            same text.
        PeerError: a rank has failed or left.
    """
    if getattr(_state, "inside", False) or group.size == 1:
        yield
        return
    _state.inside = True
    try:
        if backend.shares_memory(runtime, group) and not _compat.compiled_by_xla():
            with shared_memory.agreed(runtime, group, _terms(runtime, group, call, values)):
                yield
        else:
            with tf.control_dependencies(_agree(runtime, group, call, values)):
                yield
    finally:
        _state.inside = False


_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def collective(
    operation: str, tensors: str | None, *same: str, ragged: bool = False
) -> Callable[[_Operation], _Operation]:
    """Make a function a collective: the ranks agree on the call before its body runs.

    Args:
        operation: name of the collective.
        tensors: name of the parameter that holds the tensor or the list of tensors, or None.
        same: names of further parameters that have to be the same on every rank.
        ragged: the tensors' first dimension may differ among the ranks.
    """

    def decorate(function: _Operation) -> _Operation:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            values = given[tensors] if tensors else []
            values = values if isinstance(values, (list, tuple)) else [values]
            description = describe(operation, values, ragged, **{name: given[name] for name in same})
            with agreed(given["runtime"], given["group"], description, values):
                return function(*args, **kwargs)

        return cast(_Operation, call)

    return decorate


def _terms(runtime: Runtime, group: Group, call: Call, values: Sequence[Any]) -> shared_memory.Terms:
    eager = tf.executing_eagerly()
    if eager:
        runtime.health.check(group.name, group.ranks)

    def refuse(position: int) -> MismatchError:
        text = _report(runtime, group, call, position)
        if not eager:
            runtime.health.stop(text)  # the rest of the graph may have begun other collectives already
        return MismatchError(text)

    return shared_memory.Terms((*call.fingerprint, _shapes_number(values, call.ragged)), call.row(), refuse)


def _agree(runtime: Runtime, group: Group, call: Call, values: Sequence[Any]) -> list[tf.Tensor]:
    if _compat.compiled_by_xla():
        return []  # XLA can't stop for a message
    if tf.executing_eagerly():
        runtime.health.check(group.name, group.ranks)
    watch = graph_watch_of(runtime, group)
    first, second = call.fingerprint
    begun = watch.begin(call.row())
    with tf.control_dependencies([begun]):
        mine = tf.stack([tf.constant(first), tf.constant(second), _shapes_number(values, call.ragged), 0])
        everybody = tensorflow_backend.all_gather(runtime, mine, group)
    same = tf.reduce_all(tf.equal(everybody, everybody[0]))
    if tf.executing_eagerly():
        position = watch.end()
        if not bool(same):
            raise MismatchError(_report(runtime, group, call, int(position)))
        return []

    def refuse(position: Any) -> np.ndarray:
        text = _report(runtime, group, call, int(position))
        # The rest of the graph may have begun other collectives already, which the other ranks will never join.
        runtime.health.stop(text)
        raise MismatchError(text)

    # Both branches use the watch's variable, or TensorFlow would run this after everything else that has a state but no
    # resource; two ranks that send to each other in opposite orders would then wait for ever.
    refused = tf.cond(same, watch.end, lambda: tf.numpy_function(refuse, [watch.end()], tf.int32))
    return [refused]


def _report(runtime: Runtime, group: Group, call: Call, position: int) -> str:
    """Tell the others what this rank called, hear the same from them, and say it all."""
    key = f"mismatch/{group.key}/{position}"
    rows: list[dict[str, Any] | None] = []
    with contextlib.suppress(ClusterError):  # rank 0 is gone; the table below has gaps then
        runtime.store.set(f"{key}/{runtime.cluster.rank}", json.dumps(call.row()))
    for rank in group.ranks:
        try:
            rows.append(json.loads(runtime.store.get(f"{key}/{rank}", _DETAILS_SECONDS)))
        except (TimeoutError, ClusterError):
            rows.append(None)
    return mismatch_text(group, runtime.cluster.hosts, rows, position)


def mismatch_text(group: Group, hosts: Sequence[str], rows: Sequence[dict[str, Any] | None], position: int) -> str:
    """The error's text: what differs, one line a rank, what to do."""
    known = [row for row in rows if row is not None]
    lines = [
        f"the ranks of group {group.name!r} called different collective operations (number {position} of the group). "
        f"They differ in: {', '.join(_differences(known)) or 'shapes that only the running graph knows'}."
    ]
    shown = _positions_to_show(known)
    for rank, row in zip(group.ranks, rows):
        said = "said nothing" if row is None else _row_text(row, shown)
        lines.append(f"  rank {rank} on host {hosts[rank]}: {said}")
    lines.append(
        "Likely cause: the script takes another branch on some ranks, builds another model, or calls in another "
        "order.\n"
        "What to do: make every rank call the same operations with the same dtypes and shapes in the same order; the "
        "lines "
        "above say where each rank is."
    )
    return "\n".join(lines)


def _differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    if len({row["operation"] for row in rows}) > 1:
        found.append("operation")
    for key in sorted({key for row in rows for key in row["details"]}):
        if len({row["details"].get(key) for row in rows}) > 1:
            found.append(key)
    if len({len(row["tensors"]) for row in rows}) > 1:
        found.append("number of tensors")
    elif any(len(set(texts)) > 1 for texts in zip(*(row["tensors"] for row in rows))):
        found.append("dtype, shape or kind of " + ", ".join(f"tensor {i}" for i in _positions_to_show(rows)))
    return found


def _positions_to_show(rows: Sequence[dict[str, Any]]) -> list[int]:
    count = min((len(row["tensors"]) for row in rows), default=0)
    differing = [i for i in range(count) if len({row["tensors"][i] for row in rows}) > 1]
    return (differing or list(range(count)))[:_SHOWN_TENSORS]


def _row_text(row: dict[str, Any], shown: Sequence[int]) -> str:
    details = " ".join(f"{key}={value}" for key, value in row["details"].items())
    tensors = "; ".join(f"tensor {i} {row['names'][i]}: {row['tensors'][i]}" for i in shown if i < len(row["tensors"]))
    return f"{row['operation']} {details} of {len(row['tensors'])} tensor(s) [{tensors}], called at {row['line']}"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tf.IndexedSlices):
        return f"sparse {value.values.dtype.name} rows of"
    return str(value.dtype.name)


def _compared(value: Any, ragged: bool) -> tf.TensorShape | None:
    """The part of a value's shape that has to be the same on every rank."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return value.values.shape[1:]
    return value.shape[1:] if ragged else value.shape


def _shape(shape: tf.TensorShape | None) -> str:
    if shape is None:
        return ""
    if shape.rank is None:
        return "[…]"
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def _name(value: Any) -> str:
    if value is None or tf.executing_eagerly():
        return "-"
    return str(getattr(value, "name", "-"))


def _shapes_number(values: Sequence[Any], ragged: bool) -> int | tf.Tensor:
    """One 32-bit number for all shapes, the same whether they were known while tracing or not: an int or int32."""
    known = 0
    unknown: list[tf.Tensor] = []
    for position, value in enumerate(values):
        shape = _compared(value, ragged)
        if shape is None:
            continue
        weights = _weights(position)
        if shape.is_fully_defined():
            known += sum(size * weight for size, weight in zip(shape.as_list(), weights)) + len(shape) * weights[-1]
        else:
            dense = value.values if isinstance(value, tf.IndexedSlices) else value
            sizes = tf.shape(dense)[1:] if ragged or dense is not value else tf.shape(dense)
            table = tf.constant(weights, tf.int32)
            unknown.append(tf.reduce_sum(sizes * table[: tf.size(sizes)]) + tf.size(sizes) * table[-1])
    total = (known + (1 << 31)) % (1 << 32) - (1 << 31)
    return tf.add_n([*unknown, tf.constant(total)]) if unknown else total


@functools.cache
def _weights(position: int) -> tuple[int, ...]:
    """Random numbers, the same on every rank: one for each dimension of a value, and one for their number."""
    return tuple(np.random.default_rng(position).integers(1 << 30, size=_MAX_DIMENSIONS + 1).tolist())


def _user_line() -> str:
    """The innermost line of the script, outside this package, TensorFlow and Keras."""
    if tf.executing_eagerly():  # nothing that AutoGraph has rewritten: the interpreter's own frames are quicker
        frame: Any = sys._getframe(1)
        while frame is not None:
            if _is_users(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return _UNKNOWN_LINE
    for entry in reversed(_compat.stack()):
        if _is_users(entry.filename):
            return f"{entry.filename}:{entry.lineno} ({entry.name})"
    return _UNKNOWN_LINE


@functools.cache
def _is_users(filename: str) -> bool:
    ours = filename.startswith((_PACKAGE, "<")) or filename == contextlib.__file__
    return not ours and not any(name in Path(filename).parts for name in _OTHERS)
