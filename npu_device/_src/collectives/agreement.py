"""Make the ranks agree on their next call before data moves; calls that don't match raise on all ranks.

Every rank sends a fingerprint of its call (operation, positions, dtypes, shapes, reduction, root): in shared memory
with the first data, between hosts in a message before it. It has the same form for every call, so that it matches even
if the calls don't. Only if the fingerprints differ do the ranks exchange the details, through the hub. A list of
gradients takes one agreement; the one in a message depends on no gradient and ends long before backward produces the
first one.

Detecting a rank that waits for one that never comes is left to ``stall``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.errors import ClusterError, PeerError
from npu_device._src.cluster.frames import counted
from npu_device._src.collectives.calling_thread import calling_thread
from npu_device._src.collectives.choice import comparing_backend_of
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.terms import Agreement, Terms
from npu_device._src.collectives.unordered import require_order

_DETAILS_SECONDS = 2.0
_PACKAGE = str(Path(__file__).parents[2])
_OTHERS = ("tensorflow", "keras", "tf_keras")
_UNKNOWN_LINE = "an unknown line"
_SHOWN_TENSORS = 3
_MAX_DIMENSIONS = 16


class MismatchError(PeerError):
    """The ranks of a group called different collectives; the text has one line per rank. A ``RuntimeError``."""


@dataclass(frozen=True)
class Call:
    """The description of a rank's next call.

    Attributes:
        operation: name of the collective.
        kinds: one text for each value of a list, by position: its dtype and whether it is sparse, or ``None``.
        shapes: the values' shapes as far as known while tracing, for the message only; the ranks compare
            the shapes of the running graph, because a rank may have traced with different static shapes.
        names: the values' names, for the message only; they may differ among ranks.
        details: whatever else must be the same on all ranks: reduction, root, tag, …
        line: the line of the script that made the call, for the message only.
        thread: the thread that made or traced the call: calls from two threads come in a different order on each rank.
        ragged: the first dimension may differ among the ranks.
    """

    operation: str
    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    names: tuple[str, ...]
    details: tuple[tuple[str, str], ...]
    line: str
    thread: str
    ragged: bool = False

    @property
    def fingerprint(self) -> tuple[int, int]:
        """Return two 32-bit numbers that are the same for calls that match."""
        return _fingerprint(self.operation, self.kinds, self.details, self.thread)

    def row(self) -> dict[str, Any]:
        """Return the call in the form that the other ranks need to describe the mismatch."""
        return {
            "operation": self.operation,
            "tensors": [f"{kind} {shape}".rstrip() for kind, shape in zip(self.kinds, self.shapes)],
            "names": list(self.names),
            "details": dict(self.details),
            "line": self.line,
            "thread": self.thread,
        }


@functools.lru_cache(maxsize=1024)
def _fingerprint(*parts: Any) -> tuple[int, int]:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, dtype="<i4")
    return int(first), int(second)


def describe(operation: str, values: Sequence[Any], ragged: bool = False, **details: Any) -> Call:
    """Return the description of a call.

    Args:
        operation: name of the collective.
        values: dense tensors, ``tf.IndexedSlices`` and ``None``.
        ragged: the first dimension may differ among the ranks.
        details: what else must be the same on every rank.
    """
    return Call(
        operation,
        tuple(_kind(value) for value in values),
        tuple(_shape(_compared(value, ragged)) for value in values),
        tuple(_name(value) for value in values),
        tuple((key, str(value)) for key, value in details.items()),
        _user_line(),
        calling_thread(),
        ragged,
    )


@contextlib.contextmanager
def agreed(
    job: Job, group: Group, call: Call, values: Sequence[Any], carries: bool | tf.Tensor | None
) -> Iterator[Agreement]:
    """Agree on a call with the group, then run the block, with the agreement for the backend.

    Args:
        job: the job.
        group: the ranks that take part.
        call: this rank's call.
        values: the call's tensors.
        carries: what ``choice.carries`` says of the data that the call moves first.

    Raises:
        RuntimeError: the call is in a function that XLA compiles, in one of a data set, or in a vectorized loop.
        MismatchError: the ranks' calls differ; in a tf.function it is raised as an error of the function, with the
            same text.
        PeerError: a rank has failed or left.
    """
    _refuse_xla(job, call)
    if group.size == 1:
        yield Agreement(job)
        return
    require_order(f"rank {job.cluster.rank}: {call.operation} was called at {call.line}")
    if group.tag is not None:
        call = replace(call, thread="")  # each tag keeps its own order, whichever threads send and receive
    with job.threads.in_call(group) as overlaps:
        comparing = comparing_backend_of(job, group)
        terms = _terms(job, group, call, overlaps)
        agreement = Agreement(job, terms, _shapes_number(values, call.ragged), carries)
        if carries is False:
            with tf.control_dependencies(comparing.exchange_terms(agreement, group)):
                yield Agreement(job)
            return
        try:
            yield agreement
            if agreement.is_open:
                comparing.exchange_terms(agreement, group)
        finally:
            agreement.take()


def _refuse_xla(job: Job, call: Call) -> None:
    """Refuse a call in a function that XLA compiles: there, the ranks can't agree on it, nor learn of a failure.

    Raises:
        RuntimeError: XLA compiles the function.
    """
    if compat.compiled_by_xla():
        raise RuntimeError(
            f"rank {job.cluster.rank}: {call.operation} was called at {call.line} in a function that XLA compiles "
            "(jit_compile=True), where a rank can't wait for the others.\n"
            "What to do: leave jit_compile out of tf.function; pass jit_compile=False to model.compile (on a GPU, "
            "Keras 3 turns XLA on by itself); or use npu.distribute.replicate(model), which turns it off."
        )


def _terms(job: Job, group: Group, call: Call, overlaps: bool) -> Terms:
    eager = tf.executing_eagerly()
    if eager:
        job.health.check(group.name, group.ranks)

    def refuse(position: int) -> MismatchError:
        text = _report(job, group, call, position, overlaps)
        if not eager:
            job.health.stop(text)  # the rest of the graph may already have started other collectives
        return MismatchError(text)

    return Terms(call.fingerprint, call.row, overlaps, refuse)


def _report(job: Job, group: Group, call: Call, position: int, overlaps: bool) -> str:
    """Exchange the calls with the other ranks, and return the text of the error."""
    mine = {**call.row(), "overlaps": overlaps}
    found = {job.cluster.rank: mine}  # if the hub is gone, the table has gaps
    with contextlib.suppress(ClusterError):
        found = job.store.gather_from(f"mismatch/{group.key}/{position}", mine, group.ranks, _DETAILS_SECONDS)
    rows = [found.get(rank) for rank in group.ranks]
    return mismatch_text(group, job.cluster.hosts, rows, position)


def mismatch_text(group: Group, hosts: Sequence[str], rows: Sequence[dict[str, Any] | None], position: int) -> str:
    """Return the error's text: what differs, one line per rank, what to do."""
    known = [row for row in rows if row is not None]
    threads = any(row.get("overlaps") for row in known) or len({row["thread"] for row in known}) > 1
    lines = [
        f"the ranks of group {group.name!r} called different collective operations (number {position} of the group). "
        f"They differ in: {', '.join(_differences(known)) or 'shapes that only the running graph knows'}."
    ]
    shown = _positions_to_show(known)
    for rank, row in zip(group.ranks, rows):
        said = "said nothing" if row is None else _row_text(row, shown, threads)
        lines.append(f"  rank {rank} on host {hosts[rank]}: {said}")
    if threads:
        lines.append(
            "Likely cause: two threads of a rank call collective operations of the same group, and their calls come in "
            "a different order on each rank.\n"
            "What to do: give each thread a group of its own (hccl.manage.api.create_group), or make all calls from "
            "one thread."
        )
        return "\n".join(lines)
    lines.append(
        "Likely cause: on some ranks the script takes another branch (for example a call inside `if rank == 0`), "
        "builds another model, or calls in a different order.\n"
        "What to do: make every rank call the same operations with the same dtypes and shapes in the same order; the "
        "lines above say where each rank is."
    )
    return "\n".join(lines)


def _differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    if len({row["operation"] for row in rows}) > 1:
        found.append("operation")
    if len({row["thread"] for row in rows}) > 1 or any(row.get("overlaps") for row in rows):
        found.append("calling thread")
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


def _row_text(row: dict[str, Any], shown: Sequence[int], thread: bool) -> str:
    operation = " ".join([row["operation"], *(f"{key}={value}" for key, value in row["details"].items())])
    tensors = "; ".join(f"tensor {i} {row['names'][i]}: {row['tensors'][i]}" for i in shown if i < len(row["tensors"]))
    called = f"{operation} of {counted(len(row['tensors']), 'tensor')} [{tensors}], called at {row['line']}"
    if not thread:
        return called
    another = " beside another thread of the rank" if row.get("overlaps") else ""
    return f"{called} in thread {row['thread']!r}{another}"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tf.IndexedSlices):
        return f"sparse {value.values.dtype.name} rows of"
    return str(value.dtype.name)


def _compared(value: Any, ragged: bool) -> tf.TensorShape | None:
    """Return the part of a value's shape that must be the same on every rank."""
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
    """Return one 32-bit number for all shapes, an int or int32; the same for static and dynamic shapes."""
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
    """Return random numbers, the same on every rank: one for each dimension of a value, and one for their number."""
    return tuple(np.random.default_rng(position).integers(1 << 30, size=_MAX_DIMENSIONS + 1).tolist())


def _user_line() -> str:
    """Return the innermost line of the script, outside this package, TensorFlow and Keras."""
    if tf.executing_eagerly():  # no code rewritten by AutoGraph: the interpreter's own frames are faster
        frame: Any = sys._getframe(1)
        while frame is not None:
            if _is_users(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return _UNKNOWN_LINE
    for entry in reversed(compat.stack()):
        if _is_users(entry.filename):
            return f"{entry.filename}:{entry.lineno} ({entry.name})"
    return _UNKNOWN_LINE


@functools.cache
def _is_users(filename: str) -> bool:
    ours = filename.startswith((_PACKAGE, "<")) or filename == contextlib.__file__
    return not ours and not any(name in Path(filename).parts for name in _OTHERS)
