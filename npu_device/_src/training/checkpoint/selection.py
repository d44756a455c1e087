"""Which ranks see the same directory (all, or those of each host), and the newest checkpoint that is whole for all."""

from __future__ import annotations

import contextlib
import logging
import secrets
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from npu_device._src.training.checkpoint import folder
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.wording import counted
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")


class Chosen(NamedTuple):
    step: int
    holder: int  # the lowest rank whose directory has the shared part
    own: bool  # each rank restores its own part, too; else the holder sends the shared part to other directories
    shared: list[str]  # names of the shared part's files
    variables: list[str]  # paths of the shared part's variables
    notes: dict[str, Any]  # of rank 0
    not_kept: tuple[str, ...]


_View = tuple[
    Optional[str], Optional[str], int
]  # what is wrong with the shared part, and the own; world size


def newest_whole(world: World | None, place: Place, directory: Path) -> Chosen | None:
    """Return the newest checkpoint that is whole on every rank, or else what is left of one; None if there is none.

    Every rank has to make the call.
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
        _log.warning(
            "%s; the newest checkpoint of step %d or before is restored",
            "; ".join(sorted(wrong)),
            steps[0],
        )
    problems: list[str] = []
    partly: Chosen | None = None
    for step in steps:
        views: list[_View] = everybody(world, _judge(directory, step, place))
        damaged = _problems(world, place, views)
        holders = [rank for rank in sorted(set(place.keepers)) if views[rank][0] is None]
        if not holders:
            problems += damaged
            continue
        saved = views[holders[0]][2]
        if saved != len(views) or not damaged:
            if problems and place.rank == 0:
                lines = "\n  ".join(problems)
                _log.warning(
                    "newer checkpoints are damaged; the one of step %d is restored:\n  %s",
                    step,
                    lines,
                )
            wrote, now = counted(saved, "rank"), counted(len(views), "rank")
            lost = [] if saved == len(views) else [_OTHER_SIZE.format(wrote=wrote, now=now)]
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


def _judge(directory: Path, step: int, place: Place) -> _View:
    try:
        manifest = folder.manifest_of(directory, step)
    except CheckpointError as error:
        return str(error), str(error), 0
    files, size = manifest["files"], int(manifest["world_size"])
    shared = folder.damage(directory, step, files, folder.SHARED) if place.is_keeper else None
    keeps_own, prefix = size == len(place.keepers), folder.own_prefix(place.rank)
    return shared, folder.damage(directory, step, files, prefix) if keeps_own else None, size


def _problems(world: World | None, place: Place, views: list[_View]) -> list[str]:
    found: dict[str, int] = {}
    for rank, (shared, own, _) in enumerate(views):
        for text in (shared, own):
            if text is not None:
                found.setdefault(text, rank)
    if world is None or len(set(place.keepers)) == 1:
        return list(found)
    return [f"on host {world.job.cluster.hosts[rank]}: {text}" for text, rank in found.items()]


def _chosen(
    world: World | None, directory: Path, step: int, place: Place, holder: int, lost: list[str]
) -> Chosen:
    manifest: Any = folder.manifest_of(directory, step) if place.rank == holder else None
    manifest = manifest if world is None else world.object_from_root(manifest, holder)
    shared = sorted(name for name in manifest["files"] if name.startswith(f"{folder.SHARED}."))
    return Chosen(
        step, holder, not lost, shared, manifest["variables"], manifest["notes"], tuple(lost)
    )


_PIECE = 1 << 22  # bytes that are sent at a time, as text where pickle isn't read


class Place(NamedTuple):
    """The directory of the files of this rank, and the ranks that share it."""

    token: str  # random, the same on all ranks
    keepers: tuple[int, ...]  # for each rank, the lowest rank that sees the same directory
    rank: int

    @property
    def is_keeper(self) -> bool:
        """Return True on the rank that names and removes the checkpoints of this directory."""
        return self.keepers[self.rank] == self.rank


def everybody(world: World | None, value: Any) -> list[Any]:
    return [value] if world is None else world.objects(value, "checkpoint")


def on_all_ranks(world: World | None, part: Callable[[], Any], what: str) -> list[Any]:
    """Do a part of the work on every rank; return the results by rank, or raise CheckpointError with all problems."""
    result = problem = None
    try:
        result = part()
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    found = everybody(world, (problem, result))
    problems = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
    if problems:
        lines = problems.values() if world is None else world.job.cluster.lines(problems)
        raise CheckpointError("\n".join([what, *lines]))
    return [result for _, result in found]


def find_place(world: World | None, directory: Path) -> Place:
    """Create the directory, and find out which ranks see it, or raise CheckpointError; every rank has to call this."""
    token = secrets.token_hex(4)
    token = token if world is None else world.object_from_root(token)
    rank, size = (0, 1) if world is None else (world.rank, world.size)

    def mark(of: int) -> Path:
        return directory / f".seen-{token}-{of}"

    def leave_mark() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mark(rank).touch()

    try:
        on_all_ranks(world, leave_mark, f"can't write checkpoints to {directory}:")
        # By name, since a network file system may show an old list of a directory's entries.
        keeper = next(other for other in range(size) if mark(other).exists())
        return Place(token, tuple(everybody(world, keeper)), rank)
    finally:
        with contextlib.suppress(OSError):
            mark(rank).unlink(missing_ok=True)


def send_files(world: World, folder: Path, names: list[str], root: int, takes: bool) -> None:
    """Send the root's files in a folder to the ranks that take them; every rank has to call this."""
    if takes:
        folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with contextlib.ExitStack() as stack:
            source = stack.enter_context((folder / name).open("rb")) if world.rank == root else None
            target = stack.enter_context((folder / name).open("wb")) if takes else None
            while piece := world.object_from_root(source.read(_PIECE) if source else b"", root):
                if target:
                    target.write(piece)
