"""The error for ranks whose calls differ: one line per rank, what differs, the likely cause, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from npu_device._src.cluster.errors import ClusterError, PeerError
from npu_device._src.cluster.frames import counted
from npu_device._src.cluster.time_limits import DETAILS_SECONDS
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_SHOWN_TENSORS = 3


class MismatchError(PeerError):
    """The ranks of a group called different collectives; the text has one line per rank. A ``RuntimeError``."""


def mismatch(job: Job, group: Group, mine: dict[str, Any], position: int) -> MismatchError:
    """Exchange the calls with the other ranks, through the hub, and return the error. ``mine`` is ``Call.row`` of this
    rank, and whether the call ``overlaps`` with one of another thread.
    """
    found = {job.cluster.rank: mine}  # if the hub is gone, the table has gaps
    with contextlib.suppress(ClusterError):
        found = job.store.gather_from(f"mismatch/{group.key}/{position}", mine, group.ranks, DETAILS_SECONDS)
    rows = [found.get(rank) for rank in group.ranks]
    known = [row for row in rows if row is not None]
    threads = any(row.get("overlaps") for row in known) or len({row["thread"] for row in known}) > 1
    lines = [
        f"the ranks of group {group.name!r} called different collective operations (number {position} of the group). "
        f"They differ in: {', '.join(_differences(known)) or 'shapes that only the running graph knows'}."
    ]
    shown = _positions_to_show(known)
    for rank, row in zip(group.ranks, rows):
        said = "said nothing" if row is None else _row_text(row, shown, threads)
        lines.append(f"  {job.cluster.name_of(rank)}: {said}")
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
