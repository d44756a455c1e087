"""Which ranks see the same directory (all, or those of each host), and the newest checkpoint that is whole for all."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from npu_device._src.training.checkpoint import folder
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.distribute.ranks import is_main
from npu_device._src.wording import counted
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")


class Storage(NamedTuple):
    """A directory with the files of this rank, and the ranks that share it."""

    directory: Path
    token: str  # random, the same on all ranks
    keepers: tuple[int, ...]  # for each rank, the lowest rank that sees the same directory
    rank: int
    is_new: bool = False  # no rank has had the directory before
    world: World | None = None

    @property
    def is_keeper(self) -> bool:
        """Return True on the rank that names and removes the checkpoints of this directory."""
        return self.keepers[self.rank] == self.rank

    @property
    def has_copies(self) -> bool:
        """Return whether there are several directories, each with all files."""
        return len(set(self.keepers)) > 1

    def gather(self, value: Any) -> list:
        """Return the values of all ranks."""
        return gather(self.world, value)

    def partial(self, step: int) -> Path:
        """Return the folder in which this job writes the files of a step before they are complete."""
        return self.directory / folder.partial_name(step, self.token)


class Chosen(NamedTuple):
    storage: Storage
    step: int
    holder: int  # the lowest rank whose directory has the shared state
    manifest: dict[str, Any]  # the holder's: a rank may have the manifest of another host
    not_kept: list[str]

    @property
    def is_complete(self) -> bool:
        """Return whether each rank restores its own state, too; else the holder sends the shared one to the others."""
        return not self.not_kept

    @property
    def folder(self) -> Path:
        return self.storage.directory / folder.name_of(self.step)

    @property
    def shared_files(self) -> list[str]:
        prefix = f"{folder.SHARED}."
        return sorted(name for name in self.manifest["files"] if name.startswith(prefix))


# What is wrong with the shared state, or None; the same for this rank's own state; the world size.
_View = tuple[Optional[str], Optional[str], int]


def newest_whole(storage: Storage) -> Chosen | None:
    """Return the newest checkpoint that is whole on every rank, or else what is left of one; None if there is none.

    Every rank has to make the call.
    """
    # One list for each directory is enough.
    named = folder.steps(storage.directory) if storage.is_keeper else ([], None)
    listed = storage.gather(named)
    steps = sorted({step for rank_steps, _ in listed for step in rank_steps}, reverse=True)
    wrong = {problem for _, problem in listed if problem is not None}
    if wrong and not steps:
        raise CheckpointError(
            f"no checkpoint can be restored: {'; '.join(sorted(wrong))}.\nWhat to do: write a step that is there into "
            "that file; or start over in another directory."
        )
    if wrong:
        warn(
            "%s; the newest checkpoint of step %d or before is restored",
            "; ".join(sorted(wrong)),
            steps[0],
        )
    problems = []
    partly: Chosen | None = None
    for step in steps:
        views: list[_View] = storage.gather(_judge(storage, step))
        damaged = _problems(storage, views)
        keepers = sorted(set(storage.keepers))
        holders = [rank for rank in keepers if views[rank][0] is None]
        if not holders:
            problems += damaged
            continue
        saved = views[holders[0]][2]
        if saved != len(views) or not damaged:
            if problems:
                lines = "\n  ".join(problems)
                warn(
                    "newer checkpoints are damaged; the one of step %d is restored:\n  %s",
                    step,
                    lines,
                )
            lost = []
            if saved != len(views):
                wrote = counted(saved, "rank")
                now = counted(len(views), "rank")
                lost = [_OTHER_SIZE.format(wrote=wrote, now=now)]
            return _chosen(storage, step, holders[0], lost)
        problems += damaged
        if partly is None:
            partly = _chosen(storage, step, holders[0], [_ALL_OWN, *damaged])
    if partly is None and steps:
        raise CheckpointError(
            f"none of the checkpoints in {storage.directory} can be used:\n  "
            + "\n  ".join(problems)
            + "\nWhat to do: copy them from a backup, or start over in another directory."
        )
    return partly


_ALL_OWN = "what each rank has of its own (iterators, generators, random states), since no checkpoint is whole:"
_OTHER_SIZE = (
    "what each rank has of its own (generators, random states): {wrote} wrote the checkpoint, and the job now has "
    "{now}"
)


def _judge(storage: Storage, step: int) -> _View:
    directory = storage.directory
    try:
        manifest = folder.manifest_of(directory, step)
    except CheckpointError as error:
        return str(error), str(error), 0
    files = manifest["files"]
    size = int(manifest["world_size"])
    shared = None
    if storage.is_keeper:
        shared = folder.damage(directory, step, files, folder.SHARED)
    own = None
    # With another number of ranks, none gets its own state back.
    if size == len(storage.keepers):
        own = folder.damage(directory, step, files, folder.own_prefix(storage.rank))
    return shared, own, size


def _problems(storage: Storage, views: list[_View]) -> list[str]:
    ranks_by_text: dict[str, int] = {}
    for rank, (shared, own, _) in enumerate(views):
        for text in (shared, own):
            if text is not None:
                ranks_by_text.setdefault(text, rank)
    world = storage.world
    if world is None or not storage.has_copies:
        return list(ranks_by_text)
    return [
        f"on host {world.job.cluster.hosts[rank]}: {text}" for text, rank in ranks_by_text.items()
    ]


def _chosen(storage: Storage, step: int, holder: int, lost: list[str]) -> Chosen:
    manifest: Any = None
    if storage.rank == holder:
        manifest = folder.manifest_of(storage.directory, step)
    if storage.world is not None:
        manifest = storage.world.object_from_root(manifest, holder)
    return Chosen(storage, step, holder, manifest, lost)


_PIECE = 1 << 22  # bytes that are sent at a time, as text where pickle isn't read


def gather(world: World | None, value: Any) -> list:
    if world is None:
        return [value]
    return world.objects(value, "checkpoint")


def warn(text: str, *details: object) -> None:
    """Warn on rank 0."""
    if is_main():
        _log.warning(text, *details)


def on_all_ranks(world: World | None, action: Callable[[], Any], title: str) -> list:
    """Do a part of the work on every rank; return the results by rank, or raise CheckpointError with all problems."""
    result = problem = None
    try:
        result = action()
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    # All ranks learn of a problem before they go on, and raise alike.
    answers = gather(world, (problem, result))
    problems = {rank: text for rank, (text, _) in enumerate(answers) if text is not None}
    if problems:
        lines = list(problems.values())
        if world is not None:
            lines = world.job.cluster.lines(problems)
        raise CheckpointError("\n".join([title, *lines]))
    return [result for _, result in answers]


def find_storage(world: World | None, directory: Path) -> Storage:
    """Create the directory, and find out which ranks see it, or raise CheckpointError; every rank has to call this."""
    token = secrets.token_hex(4)
    rank = 0
    size = 1
    if world is not None:
        token = world.object_from_root(token)
        rank = world.rank
        size = world.size

    def mark_of(marking_rank: int) -> Path:
        return directory / f".seen-{token}-{marking_rank}"

    def leave_mark() -> bool:
        """Return whether this rank has made the directory: one rank does, of those that share a new one."""
        is_made = True
        try:
            directory.mkdir(parents=True)
        except OSError:
            # Some file systems check the rights to make one first.
            if not directory.is_dir():
                raise
            is_made = False
        mark_of(rank).touch()
        return is_made

    try:
        made = on_all_ranks(world, leave_mark, f"can't write checkpoints to {directory}:")
        # Marks are looked for by name, since a network file system may show an old list of a directory's entries.
        keeper = next(candidate for candidate in range(size) if mark_of(candidate).exists())
        keepers = tuple(gather(world, keeper))
        return Storage(directory, token, keepers, rank, sum(made) == len(set(keepers)), world)
    finally:
        with contextlib.suppress(OSError):
            mark_of(rank).unlink(missing_ok=True)


def send_files(world: World, folder: Path, names: list[str], root: int, receives: bool) -> None:
    """Send the root's files in a folder to the ranks that take them; every rank has to call this."""
    if receives:
        folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        source_path = Path(os.devnull)
        target_path = Path(os.devnull)
        if world.rank == root:
            source_path = folder / name
        if receives:
            target_path = folder / name
        with source_path.open("rb") as source, target_path.open("wb") as target:
            while piece := world.object_from_root(source.read(_PIECE), root):
                target.write(piece)


def complete(
    storage: Storage,
    step: int,
    keep: int,
    manifest: Callable[[], dict[str, Any]],
    title: str,
) -> None:
    """Make a checkpoint of the folders with the files of a step; every rank has to call this.

    Args:
        keep: the number of checkpoints that stay.
        manifest: called on each keeper before its checkpoint is complete.
    """

    def finish() -> None:
        partial = storage.partial(step).name
        folder.finish(storage.directory, partial, step, manifest())

    def name_latest() -> None:
        folder.name_latest(storage.directory, step)
        warn_of_remains(folder.keep_only(storage.directory, step, keep))

    # The checkpoint is whole on all hosts before any of them names it.
    for stage in (finish, name_latest):
        on_all_ranks(storage.world, stage if storage.is_keeper else lambda: None, title)


def warn_of_remains(problems: Sequence[str]) -> None:
    for problem in problems:
        _log.warning("an old checkpoint can't be removed: %s", problem)
