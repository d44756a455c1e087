"""A rank's next call of a collective: what the ranks compare of it, the thread and line that made it, and the error for
calls that differ.

Every rank sends a fingerprint of its call (operation, dtypes, shapes, reduction, root, thread) before data moves. It
has the same form for every call, so that the messages fit even if the calls don't.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import DETAILS_SECONDS
from npu_device._src.cluster.tracebacks import is_user_file
from npu_device._src.collectives.calling_threads import calling_thread
from npu_device._src.collectives.group import Group
from npu_device._src.wording import counted

_MAX_DIMENSIONS = 16
_SHOWN_TENSORS = 3


@dataclass(frozen=True)
class Call:
    """The description of the next call of a rank.

    Attributes:
        shapes: of each value, the part that must be the same on every rank, as far as known while tracing. The ranks
            compare the shapes of the running graph: a rank may have traced with different static shapes.
        thread: the one that made or traced the call: calls from two threads come in a different order on each rank.
    """

    operation: str
    kinds: tuple[str, ...]  # of each value, its dtype and whether it is sparse, or ``None``
    shapes: tuple[Optional[tf.TensorShape], ...]
    names: tuple[str, ...]  # of the values, for the message only; they may differ among ranks
    details: tuple[
        tuple[str, str], ...
    ]  # whatever else must be the same on all ranks: reduction, root, tag, …
    line: str  # of the script, for the message only
    thread: str

    @property
    def fingerprint(self) -> tuple[int, int]:
        """Return two 32-bit numbers that are the same for calls that match."""
        return _fingerprint(self.operation, self.kinds, self.details, self.thread)

    def row(self) -> dict[str, Any]:
        """Return the call as the other ranks need it, to describe a mismatch."""
        return {
            "operation": self.operation,
            "tensors": [
                f"{kind} {_text(shape)}".rstrip() for kind, shape in zip(self.kinds, self.shapes)
            ],
            "names": list(self.names),
            "details": dict(self.details),
            "line": self.line,
            "thread": self.thread,
        }


@functools.lru_cache(maxsize=1024)
def _fingerprint(*parts: Any) -> tuple[int, int]:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, dtype="<i4").tolist()
    return first, second


def describe(operation: str, values: Sequence[Any], ragged: bool, details: dict[str, Any]) -> Call:
    """Return the description of a call. Of ``ragged`` values, the first dimension may differ among the ranks."""
    kinds, shapes, names, eager = [], [], [], tf.executing_eagerly()
    for value in values:
        sparse = isinstance(value, tf.IndexedSlices)
        dense = value.values if sparse else value
        kinds.append(
            "None"
            if value is None
            else f"sparse {dense.dtype.name} rows of"
            if sparse
            else dense.dtype.name
        )
        shapes.append(
            None if value is None else dense.shape[1:] if sparse or ragged else dense.shape
        )
        names.append("-" if value is None or eager else str(getattr(value, "name", "-")))
    texts = tuple(zip(details, map(str, details.values())))
    return Call(
        operation, tuple(kinds), tuple(shapes), tuple(names), texts, user_line(), calling_thread()
    )


def shapes_number(call: Call, values: Sequence[Any], ragged: bool) -> int | tf.Tensor:
    """Return one 32-bit number for all shapes, an int or int32; the same for static and dynamic shapes."""
    known = 0
    unknown: list[tf.Tensor] = []
    for position, (value, shape) in enumerate(zip(values, call.shapes)):
        if shape is None:
            continue
        weights = _weights(position)
        if shape.is_fully_defined():
            known += sum(map(operator.mul, shape.as_list(), weights)) + len(shape) * weights[-1]
        else:
            dense = value.values if isinstance(value, tf.IndexedSlices) else value
            sizes = tf.shape(dense)[1:] if ragged or dense is not value else tf.shape(dense)
            table = tf.constant(weights, tf.int32)
            unknown.append(
                tf.reduce_sum(sizes * table[: tf.size(sizes)]) + tf.size(sizes) * table[-1]
            )
    total = (known + (1 << 31)) % (1 << 32) - (1 << 31)
    return tf.add_n([*unknown, tf.constant(total)]) if unknown else total


@functools.cache
def _weights(position: int) -> tuple[int, ...]:
    """Return random numbers, the same on every rank: one for each dimension of a value, and one for their number."""
    return tuple(
        np.random.default_rng(position).integers(1 << 30, size=_MAX_DIMENSIONS + 1).tolist()
    )


def _text(shape: tf.TensorShape | None) -> str:
    if shape is None or shape.rank is None:
        return "" if shape is None else "[…]"
    return str(shape.as_list()).replace("None", "?")


# The line of the script


def user_line() -> str:
    """Return the innermost line of the script, outside of libraries; the outermost line if all are in libraries."""
    last = "an unknown line"
    for filename, line, name in compat.lines_of_stack(sys._getframe(1)):
        if is_user_file(filename):
            return f"{filename}:{line} ({name})"
        last = last if filename.startswith("<") else f"{filename}:{line} ({name})"
    return last


# What the ranks compare


class Terms(NamedTuple):
    """What the ranks compare of a call before they read each other's data."""

    head: tuple[int, int]  # two 32-bit numbers that are the same on all ranks
    shapes: (
        int | tf.Tensor
    )  # 32 bits, the same if the tensors' shapes are; a tensor if only the graph knows it
    row: Callable[[], dict[str, Any]]  # the call as the stall watch shows it
    overlaps: bool  # another thread of this rank is in a call of the group: every rank refuses
    refuse: Callable[
        [int], Exception
    ]  # the error for heads that differ, given the position of the call in the group
    agreed: bool = False  # the ranks have compared the call, and this is a later transfer of it

    def of_later_transfers(self) -> Terms:
        """Return what they have: which call they belong to. Nothing of it refers to the graph."""
        return self._replace(shapes=0, agreed=True)


# Calls that differ


class MismatchError(PeerError):
    """The ranks of a group called different collectives; the text has one line per rank. A ``RuntimeError``."""


def mismatch(
    cluster: Cluster, store: ControlChannel, group: Group, own_row: dict[str, Any], position: int
) -> MismatchError:
    """Exchange the calls (``Call.row``) with the other ranks, through the hub, and return the error."""
    rows_by_rank = {cluster.rank: own_row}  # if the hub is gone, the table has gaps
    with contextlib.suppress(ClusterError):
        key = f"mismatch/{group.key}/{position}"
        rows_by_rank = store.gather_from(key, own_row, group.ranks, DETAILS_SECONDS)
    rows = [rows_by_rank.get(rank) for rank in group.ranks]
    known = [row for row in rows if row is not None]
    threads = any(row.get("overlaps") for row in known) or len({row["thread"] for row in known}) > 1
    lines = [
        f"the ranks of group {group.name!r} called different collective operations (number {position} of the group). "
        f"They differ in: {', '.join(_differences(known)) or 'shapes that only the running graph knows'}."
    ]
    shown = _positions_to_show(known)
    for rank, row in zip(group.ranks, rows):
        said = "said nothing" if row is None else _row_text(row, shown, threads)
        lines.append(f"  {cluster.name_of(rank)}: {said}")
    if threads:
        lines.append(
            "Likely cause: two threads of a rank call collective operations of the same group, and their calls come in "
            "a different order on each rank.\n"
            "What to do: give each thread a group of its own (hccl.manage.api.create_group), or make all calls from "
            "one thread."
        )
    else:
        lines.append(
            "Likely cause: on some ranks the script takes another branch (for example a call inside `if rank == 0`), "
            "builds another model, or calls in a different order.\n"
            "What to do: make every rank call the same operations with the same dtypes and shapes in the same order; "
            "the lines above say where each rank is."
        )
    return MismatchError("\n".join(lines))


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
        found.append(
            "dtype, shape or kind of " + ", ".join(f"tensor {i}" for i in _positions_to_show(rows))
        )
    return found


def _positions_to_show(rows: Sequence[dict[str, Any]]) -> list[int]:
    count = min((len(row["tensors"]) for row in rows), default=0)
    differing = [i for i in range(count) if len({row["tensors"][i] for row in rows}) > 1]
    return (differing or list(range(count)))[:_SHOWN_TENSORS]


def _row_text(row: dict[str, Any], shown: Sequence[int], thread: bool) -> str:
    operation = " ".join(
        [row["operation"], *(f"{key}={value}" for key, value in row["details"].items())]
    )
    tensors = "; ".join(
        f"tensor {i} {row['names'][i]}: {row['tensors'][i]}"
        for i in shown
        if i < len(row["tensors"])
    )
    called = f"{operation} of {counted(len(row['tensors']), 'tensor')} [{tensors}], called at {row['line']}"
    if not thread:
        return called
    another = " beside another thread of the rank" if row.get("overlaps") else ""
    return f"{called} in thread {row['thread']!r}{another}"
