"""``NPU_DEVICE_SPLIT``: the split that a list of gradients gets from the environment, if any.

Either numbers, to try a split, or ``auto``: a split that was found for these gradients on this cluster
(``saved_splits``). Rank 0 reads the files and sends them through the store, so that all ranks cut in the same way,
also on hosts with different home directories. The script's own ``set_split_strategy_by_…`` takes precedence; the
caller sees to that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.choice import backend_name
from npu_device._src.collectives.group import group_of
from npu_device._src.collectives.job import Job, current
from npu_device._src.gradients.saved_splits import (
    SavedSplit,
    directory,
    fingerprint,
    load_all,
    place_of,
    processor_of_this_host,
)

_KEY = "saved_splits"
# Shorter lists are metrics and the like, not a model's gradients; they need no message.
_FEWEST_GRADIENTS = 4

_log = logging.getLogger("npu_device")
_said: set[str] = set()


@dataclass(frozen=True)
class _SharedSplits:
    """The splits that rank 0 has sent to all ranks."""

    processor: str
    splits: Sequence[SavedSplit]
    where: str


def send_splits(job: Job) -> None:
    """Send the splits that rank 0 knows to every rank, with ``NPU_DEVICE_SPLIT=auto``; called once the cluster runs.

    Args:
        job: the job. Every rank calls this.

    Raises:
        ValueError: ``NPU_DEVICE_SPLIT`` is malformed.
        TimeoutError: rank 0 did not tell; the ranks don't have the same ``NPU_DEVICE_SPLIT``.
    """
    if environment.NPU_DEVICE_SPLIT.get() != "auto":
        return
    shared: dict[str, Any]
    if job.cluster.rank == 0:
        found = [asdict(split) for split in load_all()]
        shared = {"processor": processor_of_this_host(), "splits": found, "where": str(directory())}
        job.store.set(_KEY, json.dumps(shared))
    else:
        shared = json.loads(job.store.get(_KEY, environment.HCCL_CONNECT_TIMEOUT.get()))
    splits = [SavedSplit.from_dict(split) for split in shared["splits"]]
    job.add(_SharedSplits(shared["processor"], splits, shared["where"]))


def ends_for(sizes: Sequence[int], dtype: str, group: str) -> list[int] | None:
    """Return the environment's split of a list of gradients.

    Args:
        sizes: bytes of each gradient, in the order of production.
        dtype: their dtype's name.
        group: name of the group.

    Returns:
        The last gradient of each segment; None when the environment has no split that fits.
    """
    wanted = environment.NPU_DEVICE_SPLIT.get()
    if wanted is None:
        return None
    if not isinstance(wanted, str):
        if wanted[-1] == len(sizes) - 1:
            return list(wanted)
        _warn_once(
            sizes,
            f"NPU_DEVICE_SPLIT={','.join(map(str, wanted))} is not applied to {len(sizes)} {dtype} gradients of group "
            f"{group!r}: its last number has to be {len(sizes) - 1}",
        )
        return None
    job = current()
    shared = None if job is None else job.part(_SharedSplits)
    if job is None or shared is None:
        return None
    return _found(job, shared, sizes, dtype, group)


def _found(job: Job, shared: _SharedSplits, sizes: Sequence[int], dtype: str, group: str) -> list[int] | None:
    model = fingerprint(dtype, sizes)
    backend = backend_name(job, group_of(job, group), [tf.as_dtype(dtype)])
    place = place_of(job.cluster.hosts, backend, shared.processor)
    same_model = [split for split in shared.splits if (split.model, split.group) == (model, group)]
    for split in same_model:
        if split.place == place:
            return list(split.ends)
    what = f"NPU_DEVICE_SPLIT=auto: no split is known for {len(sizes)} {dtype} gradients of group {group!r}"
    if same_model:
        differences = "; ".join(same_model[0].place.differences(place))
        why = f"this model's was found elsewhere, and may be wrong here: {differences}"
    elif shared.splits:
        why = f"those in {shared.where} are for other gradients: the model has changed since, or was never tuned"
    else:
        why = f"there is none in {shared.where} on rank 0's host"
    _warn_once(sizes, f"{what}; {why}. The default split is used. What to do: find one with npurun --tune.")
    return None


def _warn_once(sizes: Sequence[int], text: str) -> None:
    if len(sizes) >= _FEWEST_GRADIENTS and text not in _said:
        _said.add(text)
        _log.warning("%s", text)
