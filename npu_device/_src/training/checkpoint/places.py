"""Finds out which ranks see the same directory: all, or without a shared file system those of each host."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.world import World

_PIECE = 1 << 26  # bytes that are sent at a time


@dataclass(frozen=True)
class Place:
    """The directory of the files of this rank, and the ranks that share it."""

    token: str  # random, the same on all ranks
    keepers: tuple[int, ...]  # for each rank, the lowest rank that sees the same directory
    rank: int

    @property
    def is_keeper(self) -> bool:
        """Return True on the rank that names and removes the checkpoints of this directory."""
        return self.keepers[self.rank] == self.rank


def everybody(world: World | None, value: Any) -> list[Any]:
    """Return the value of every rank, by rank."""
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
        try:
            directory.mkdir(parents=True, exist_ok=True)
            mark(rank).touch()
        except OSError as error:
            raise CheckpointError(str(error)) from error

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
    for name in names:
        path = folder / name
        size = world.object_from_root(path.stat().st_size if world.rank == root else 0, root)
        if takes:
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(path.open("rb")) if world.rank == root else None
            target = stack.enter_context(path.open("wb")) if takes else None
            for begin in range(0, size, _PIECE):
                length = min(_PIECE, size - begin)
                mine = tf.io.decode_raw(source.read(length), tf.uint8) if source else tf.zeros([length], tf.uint8)
                [piece] = world.from_root([mine], root)
                if target:
                    target.write(piece.numpy().tobytes())
