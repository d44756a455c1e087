"""A rank's next call of a collective: what the ranks compare of it, the thread and line that made it, and the error for
calls that differ.

Every rank sends a fingerprint of its call (collective, dtypes, reduction, root, thread) and a digest of the shapes: in
shared memory with the first data, between hosts in a message before the data. Both have the same form for every call,
so that the messages fit even if the calls don't.
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

Row = dict[str, Any]
"""A call as the other ranks need it, to describe a mismatch or a stall; see ``Call.row``."""

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

    collective: str
    kinds: tuple[str, ...]  # dtype of each value and whether it is sparse, or ``None``
    shapes: tuple[Optional[tf.TensorShape], ...]
    names: tuple[str, ...]  # names of the values, for the message only; they may differ among ranks
    # What else must be the same on all ranks: reduction, root, tag, …
    details: tuple[tuple[str, str], ...]
    line: str  # line of the script, for the message only
    thread: str
    in_function: bool = False  # made by a ``tf.function``

    @property
    def fingerprint(self) -> tuple[int, int]:
        """Return two 32-bit numbers that are the same for calls that match."""
        return _fingerprint(self.collective, self.kinds, self.details, self.thread)

    def row(self) -> Row:
        """Return the call in the form of a message."""
        tensors = [f"{dtype} {_text(shape)}" for dtype, shape in zip(self.kinds, self.shapes)]
        return {
            "collective": self.collective,
            "tensors": list(map(str.rstrip, tensors)),
            "names": list(self.names),
            "details": dict(self.details),
            "line": self.line,
            "thread": self.thread,
            "in_function": self.in_function,
        }


@functools.lru_cache(maxsize=1024)
def _fingerprint(*contents: Any) -> tuple[int, int]:
    # blake2b, unlike ``hash``, gives the same number in every process.
    digest = hashlib.blake2b(json.dumps(contents).encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, dtype="<i4").tolist()
    return first, second


def describe(collective: str, tensors: Sequence, is_ragged: bool, details: dict[str, Any]) -> Call:
    """Return the description of a call. Of ``is_ragged`` values, the first dimension may differ among the ranks."""
    kinds = []
    shapes = []
    names = []
    for tensor in tensors:
        kind, shape = _kind_and_shape(tensor, is_ragged)
        kinds.append(kind)
        shapes.append(shape)
        name = "-"
        # Eager tensors have no names.
        if tensor is not None and not tf.executing_eagerly():
            name = str(getattr(tensor, "name", "-"))
        names.append(name)
    texts = tuple(zip(details, map(str, details.values())))
    line = user_line()
    thread = calling_thread()
    return Call(collective, tuple(kinds), tuple(shapes), tuple(names), texts, line, thread)


def _kind_and_shape(tensor: Any, is_ragged: bool) -> tuple[str, tf.TensorShape | None]:
    if tensor is None:
        return "None", None
    # How many rows a rank has picked is its own matter; only their shape has to agree.
    if isinstance(tensor, tf.IndexedSlices):
        return f"sparse {tensor.values.dtype.name} rows of", tensor.values.shape[1:]
    if is_ragged:
        return tensor.dtype.name, tensor.shape[1:]
    return tensor.dtype.name, tensor.shape


def shapes_digest(call: Call, tensors: Sequence, is_ragged: bool) -> tuple[int, list[tf.Tensor]]:
    """Return a number and int32 scalars of the graph, whose sum stands for all shapes; the same for static and dynamic
    ones. The sum is wrapped into 32 bits.
    """
    digest = 0
    dynamic = []
    for position, (tensor, shape) in enumerate(zip(tensors, call.shapes)):
        if shape is None:
            continue
        # Weights tell [2, 3] from [3, 2], and the shape of one tensor from the shape of the next.
        weights = _weights(position)
        if shape.is_fully_defined():
            # The number of dimensions counts, too: [1, 1] isn't [1].
            digest += sum(map(operator.mul, shape.as_list(), weights)) + len(shape) * weights[-1]
            continue
        is_sparse = isinstance(tensor, tf.IndexedSlices)
        sizes = tf.shape(tensor.values if is_sparse else tensor)
        if is_ragged or is_sparse:
            sizes = sizes[1:]
        table = tf.constant(weights, tf.int32)
        count = tf.size(sizes)
        dynamic.append(tf.reduce_sum(sizes * table[:count]) + count * table[-1])
    return digest, dynamic


def wrapped(number: int) -> int:
    """Return a number wrapped into the range of int32, as the additions of a graph are."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@functools.cache
def _weights(position: int) -> tuple[int, ...]:
    """Return random numbers, the same on every rank: one for each dimension of a value, and one for their number."""
    generator = np.random.default_rng(position)
    weights = generator.integers(1 << 30, size=_MAX_DIMENSIONS + 1)
    return tuple(weights.tolist())


def _text(shape: tf.TensorShape | None) -> str:
    if shape is None:
        return ""
    if shape.rank is None:
        return "[…]"
    return str(shape.as_list()).replace("None", "?")


# The line of the script


def user_line() -> str:
    """Return the innermost line of the script, outside of libraries; the outermost line if all are in libraries."""
    # For a script that is itself installed as a package, its outermost frame is the best guess.
    outermost = "an unknown line"
    for filename, line, function in compat.lines_of_stack(sys._getframe(1)):
        if is_user_file(filename):
            return f"{filename}:{line} ({function})"
        if not filename.startswith("<"):
            outermost = f"{filename}:{line} ({function})"
    return outermost


# What the ranks compare


class Terms(NamedTuple):
    """What the ranks compare of a call before they read each other's data."""

    fingerprint: tuple[int, int]  # see ``Call.fingerprint``
    digest: int  # of shapes; 32 bits
    row: Optional[Callable[[], Row]]  # the call as the stall watch shows it; None for ``AGREED``
    overlaps: bool  # another thread of this rank is in a call of the group: every rank refuses
    # Returns the error for calls that differ, given the position of the transfer in the group.
    error_for_mismatch: Callable[[int], Exception]
    agreed: bool = False  # the ranks have compared the call, and this is a later transfer of it
    # Added to the digest: what only the running graph knows, other shapes and, in a function, the calling thread.
    dynamic_digest: int | tf.Tensor = 0

    def of_later_transfers(self) -> Terms:
        """Return what they have: which call they belong to. Nothing of it refers to the graph."""
        if self.agreed:
            return self
        return self._replace(digest=0, dynamic_digest=0, agreed=True)


def _refuse(position: int) -> Exception:
    return RuntimeError("the ranks of a group called different collectives")


AGREED = Terms((0, 0), 0, None, False, _refuse, agreed=True)
"""Terms without a call: the ranks have agreed on it before, and nothing tells it from others."""


# Calls that differ


class MismatchError(PeerError):
    """The ranks of a group called different collectives; the text has one line per rank. A ``RuntimeError``."""


def mismatch(
    cluster: Cluster, control: ControlChannel, group: Group, own_row: Row, position: int
) -> tuple[MismatchError, bool]:
    """Exchange the calls (``Call.row``) with the other ranks, through the hub. Return the error, and whether some rank
    made its call in a ``tf.function``.
    """
    # If the hub is gone, the table lacks the rows of the other ranks.
    rows_by_rank = {cluster.rank: own_row}
    with contextlib.suppress(ClusterError):
        key = f"mismatch/{group.key}/{position}"
        rows_by_rank = control.gather_from(key, own_row, group.ranks, DETAILS_SECONDS)
    rows = [rows_by_rank.get(rank) for rank in group.ranks]
    answers = [row for row in rows if row is not None]
    threads = _threads_differ(answers)
    lines = [
        f"the ranks of group {group.name!r} called different collective operations (after "
        f"{counted(position, 'transfer')} of the group). "
        f"They differ in: {', '.join(_differences(answers)) or 'shapes that only the running graph knows'}."
    ]
    positions = _positions_to_show(answers)
    for rank, row in zip(group.ranks, rows):
        said = "said nothing"
        if row is not None:
            said = _row_text(row, positions, threads)
        lines.append(f"  {cluster.name_of(rank)}: {said}")
    if threads:
        lines.append(
            "Likely cause: two threads of a rank call collective operations of the same group, and their calls come in "
            "a different order on each rank; or a thread has the rank in its name.\n"
            "What to do: give each thread a group of its own (hccl.manage.api.create_group), or make all calls from "
            "one thread. Threads that take turns in a group need names (threading.Thread(name=…)). Give a thread the "
            "same name on all ranks."
        )
    else:
        lines.append(
            "Likely cause: on some ranks the script takes another branch (for example a call inside `if rank == 0`), "
            "builds another model, or calls in a different order.\n"
            "What to do: make every rank call the same operations with the same dtypes and shapes in the same order; "
            "the lines above say where each rank is."
        )
    return MismatchError("\n".join(lines)), any(row["in_function"] for row in answers)


def _differences(rows: Sequence[Row]) -> list[str]:
    differences = []
    if len({row["collective"] for row in rows}) > 1:
        differences.append("operation")
    if _threads_differ(rows):
        differences.append("calling thread")
    for key in sorted({key for row in rows for key in row["details"]}):
        if len({row["details"].get(key) for row in rows}) > 1:
            differences.append(key)
    texts = [row["tensors"] for row in rows]
    if len(set(map(len, texts))) > 1:
        differences.append("number of tensors")
    elif any(len(set(same_position)) > 1 for same_position in zip(*texts)):
        # Tensors are compared by position, which needs the same number of them on all ranks.
        tensors = ", ".join(f"tensor {position}" for position in _positions_to_show(rows))
        differences.append(f"dtype, shape or kind of {tensors}")
    return differences


def _positions_to_show(rows: Sequence[Row]) -> list[int]:
    texts = [row["tensors"] for row in rows]
    count = min(map(len, texts), default=0)
    differing = [i for i in range(count) if len({tensors[i] for tensors in texts}) > 1]
    return (differing or list(range(count)))[:_SHOWN_TENSORS]


def _threads_differ(rows: Sequence[Row]) -> bool:
    """Return whether calls come from different threads, or some rank is in two calls at once."""
    threads = {row["thread"] for row in rows}
    return len(threads) > 1 or any(row.get("overlaps") for row in rows)


def _row_text(row: Row, positions: Sequence[int], thread: bool) -> str:
    details = [f"{key}={detail}" for key, detail in row["details"].items()]
    collective = " ".join([row["collective"], *details])
    names = row["names"]
    texts = row["tensors"]
    tensors = "; ".join(f"tensor {i} {names[i]}: {texts[i]}" for i in positions if i < len(texts))
    called = f"{collective} of {counted(len(texts), 'tensor')} [{tensors}], called at {row['line']}"
    if not thread:
        return called
    called += f" in thread {row['thread']!r}"
    if row.get("overlaps"):
        called += " beside another thread of the rank"
    return called
