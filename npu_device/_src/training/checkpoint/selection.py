"""Chooses the checkpoint that all ranks restore: the newest that is whole for every one of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from npu_device._src.cluster.frames import counted
from npu_device._src.training.checkpoint import folder
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.places import Place, everybody
from npu_device._src.training.world import World

_log = logging.getLogger("npu_device")


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that all ranks restore."""

    step: int
    holder: int  # the lowest rank whose directory has the shared part
    sends: bool  # the holder sends the shared part to ranks with other directories
    own: bool  # each rank restores its own part, too
    shared: list[str]  # names of the shared part's files
    variables: list[str]  # paths of the shared part's variables
    notes: dict[str, Any]  # of rank 0
    not_kept: tuple[str, ...]


@dataclass(frozen=True)
class _RankView:
    """How one rank sees one checkpoint; problems are None if there are none."""

    shared: str | None
    own: str | None
    world_size: int


def newest_whole(world: World | None, place: Place, directory: Path) -> Chosen | None:
    """Return the checkpoint to restore; None if there is none. Every rank has to make the call.

    Raises:
        CheckpointError: there are some, but each is damaged, or the latest is not there and all others are newer.
    """
    listed = everybody(world, folder.steps(directory) if place.is_keeper else ([], None))
    steps = sorted({step for some, _ in listed for step in some}, reverse=True)
    wrong = {problem for _, problem in listed if problem is not None}
    if wrong and not steps:
        raise CheckpointError(
            f"no checkpoint can be restored: {'; '.join(sorted(wrong))}.\nWhat to do: write a step that is there into "
            "that file; or start over in another directory."
        )
    if wrong and place.rank == 0:
        _log.warning("%s; the newest checkpoint of step %d or before is restored", "; ".join(sorted(wrong)), steps[0])
    problems: list[str] = []
    partly: Chosen | None = None
    for step in steps:
        views = [_RankView(*fields) for fields in everybody(world, astuple(_judge(directory, step, place)))]
        damaged = _problems(world, place, views)
        holders = [rank for rank in sorted(set(place.keepers)) if views[rank].shared is None]
        if not holders:
            problems += damaged
            continue
        saved = views[holders[0]].world_size
        if saved != len(views) or not damaged:
            if problems and place.rank == 0:
                lines = "\n  ".join(problems)
                _log.warning("newer checkpoints are damaged; the one of step %d is restored:\n  %s", step, lines)
            wrote, now = counted(saved, "rank"), counted(len(views), "rank")
            lost = None if saved == len(views) else [_OTHER_SIZE.format(wrote=wrote, now=now)]
            return _chosen(world, directory, step, place, holders[0], lost)
        problems += damaged
        if partly is None:
            partly = _chosen(world, directory, step, place, holders[0], [_ALL_OWN, *damaged])
    if partly is None and steps:
        raise CheckpointError(
            f"none of the checkpoints in {directory} can be used:\n  "
            + "\n  ".join(problems)
            + "\nWhat to do: copy them from a backup, or start over in another directory."
        )
    return partly


_ALL_OWN = "what each rank has of its own (iterators, generators, random states), since no checkpoint is whole:"


_OTHER_SIZE = (
    "what each rank has of its own (the places of its iterators, generators, random states): {wrote} wrote the "
    "checkpoint, and the job now has {now}"
)


def _judge(directory: Path, step: int, place: Place) -> _RankView:
    try:
        manifest = folder.manifest_of(directory, step)
    except CheckpointError as error:
        return _RankView(str(error), str(error), 0)
    files, size = manifest["files"], int(manifest["world_size"])
    shared = folder.damage(directory, step, files, folder.SHARED) if place.is_keeper else None
    keeps_own, prefix = size == len(place.keepers), folder.own_prefix(place.rank)
    return _RankView(shared, folder.damage(directory, step, files, prefix) if keeps_own else None, size)


def _problems(world: World | None, place: Place, views: Sequence[_RankView]) -> list[str]:
    found: dict[str, int] = {}
    for rank, view in enumerate(views):
        for text in (view.shared, view.own):
            if text is not None:
                found.setdefault(text, rank)
    if world is None or len(set(place.keepers)) == 1:
        return list(found)
    return [f"on host {world.job.cluster.hosts[rank]}: {text}" for text, rank in found.items()]


def _chosen(
    world: World | None, directory: Path, step: int, place: Place, holder: int, lost: list[str] | None
) -> Chosen:
    manifest: Any = folder.manifest_of(directory, step) if place.rank == holder else None
    manifest = manifest if world is None else world.object_from_root(manifest, holder)
    several = len(set(place.keepers)) > 1
    return Chosen(
        step=step,
        holder=holder,
        sends=several and lost is not None,
        own=lost is None,
        shared=sorted(name for name in manifest["files"] if name.startswith(f"{folder.SHARED}.")),
        variables=list(manifest["variables"]),
        notes=dict(manifest["notes"]),
        not_kept=tuple(lost or ()),
    )
