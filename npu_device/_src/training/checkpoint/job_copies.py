"""The copies in memory of a ``JobCheckpoint``: when they are made, and how the next attempt reads them.

One is made every ``memory_every`` steps, and one when the ranks end for a node that comes or goes: those that go on, of
another number, take the state from it. Without room in memory, that state is a checkpoint on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from npu_device._src import compat, environment
from npu_device._src.training.checkpoint import folder
from npu_device._src.training.checkpoint.copies_to_disk import FILE, to_files
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.memory_copies import Copier, tensors_of
from npu_device._src.training.checkpoint.preemption import Preemption
from npu_device._src.training.checkpoint.progress import note_progress
from npu_device._src.training.checkpoint.selection import Storage, on_all_ranks, warn
from npu_device._src.training.checkpoint.states import RankState, SharedState, variables_of
from npu_device._src.training.sharding.shares import bytes_of

_ON_DISK = "the state of step %d is written to the disk, and not kept in memory for the ranks that go on: %s"
_NO_ROOM = "it needs more memory than a host or container has"
_NO_OWN_FILES = "ranks can't write their own state to a temporary file:"
_NOT_COPIED = (
    "step %d isn't copied to memory: %s\nTraining goes on; checkpoints on the disk continue.\n"
    "What to do: make room for temporary files, or set TMPDIR to a directory that has some; leave out of per_rank what "
    "TensorFlow can't save."
)
_NO_COPY = "a copy isn't ready or has failed, or gradients have been added up since the last update"


@dataclass(eq=False)
class JobCopies:
    """The copies of one job."""

    _disk: Storage
    _copier: Copier
    _interval: int | None  # steps between copies; None for one at the end only
    _shared: SharedState
    _own_state: RankState
    _keep: int
    # A function of notes and the paths of variables that returns the manifest of a checkpoint.
    _manifest: Callable[[Any, list[str]], dict[str, Any]]

    _newest_step = 0  # step of the newest copy that these ranks have made
    _has_reserved = False
    _has_warned = False  # of ranks that can't write their own state

    def close(self) -> None:
        self._copier.close()

    def reserve(self) -> None:
        """Check, before the first step, that the host has memory for the copies of all variables.

        Raises:
            CheckpointError: it has less; on all ranks.
        """
        if self._interval is None or self._has_reserved:
            return
        self._has_reserved = True
        is_first = bool(self._copier.readable_slots)
        size = 0
        for variable in self._shared.variables().values():
            # The owner alone has memory for a slot of a divided optimizer.
            if compat.has_memory(variable) and (is_first or compat.is_apart(variable)):
                size += bytes_of(variable)
        self._copier.require_memory(size, self._interval)

    def free(self) -> None:
        """Free the memory of what ranks before these have left, as a checkpoint on the disk is newer."""
        if self._interval is None:
            self._copier.free()

    def copy_if_due(self, step: int, saved_step: int, notes: dict[str, Any]) -> None:
        """Copy a step if the newest copy or checkpoint is an interval older."""
        newest = max(saved_step, self._newest_step)
        if self._interval is not None and step // self._interval > newest // self._interval:
            self._copy(step, notes)

    def copy_last_step(self, step: int, notes: dict[str, Any], preemption: Preemption) -> bool:
        """Copy the last step for ranks that go on with other nodes; return False if it has to be saved on the disk."""
        copier = self._copier
        variables = self._shared.variables()
        has_room = copier.has_room(sum(map(bytes_of, variables.values())))
        answers = self._disk.gather((preemption.takes_nodes, preemption.is_signalled, has_room))
        loses_node_0 = any(answers[rank][1] for rank in copier.ranks_of_node_0)
        # When node 0 goes, no rank goes on until it is back.
        if loses_node_0 or not any(takes_nodes for takes_nodes, _, _ in answers):
            return False
        copier.wait()
        problem: str | None = _NO_ROOM
        if all(rank_has_room for _, _, rank_has_room in answers):
            problem = _NO_COPY
            if self._copy(step, notes, is_last=True) and copier.wait():
                problem = None
        problems = [text for text in self._disk.gather(problem) if text is not None]
        if problems:
            warn(_ON_DISK, step, problems[0])
        return not problems

    def _copy(self, step: int, notes: dict[str, Any], is_last: bool = False) -> bool:
        """Begin a copy of this step; return False if a rank is still busy, or can't write its own state."""
        # Between two updates, what one process has would take a reduction: the copy comes after the next update.
        is_ready = not (self._copier.is_busy or self._shared.partial_sums())
        reports = self._disk.gather((step, is_ready))
        is_one_step = len({rank_step for rank_step, _ in reports}) == 1
        if not is_one_step or not all(rank_is_ready for _, rank_is_ready in reports):
            return False
        rank_files: dict[str, bytes] = {}

        def write_own_files() -> None:
            rank_files.update(self._own_state.files(folder.own_prefix(self._disk.rank)))

        self._own_state.callbacks.collect()
        try:
            on_all_ranks(self._disk.world, write_own_files, _NO_OWN_FILES)
        except CheckpointError as error:
            if not self._has_warned:
                warn(_NOT_COPIED, step, error)
            self._has_warned = True
            return False
        else:
            self._begin(step, notes, is_last, rank_files)
            self._newest_step = step
            return True
        finally:
            self._own_state.callbacks.arrays.clear()

    def _begin(
        self, step: int, notes: dict[str, Any], is_last: bool, rank_files: Mapping[str, bytes]
    ) -> None:
        checkpoint = self._shared.checkpoint()
        variables = variables_of(checkpoint)
        paths = {id(variable): path for path, variable in variables.items()}
        rank = self._disk.rank
        header = {
            "step": step,
            "directory": str(self._disk.directory),
            "keep": self._keep,
            "rank": rank,
            "is_last": is_last,
            # After a restart, the same step may have other bits, and isn't part of the same copy.
            "attempt": environment.NPU_DEVICE_RESTART_COUNT.get(),
            "manifest": self._manifest(notes, list(variables)),
        }
        copied = tensors_of(checkpoint, paths, rank, is_last)
        for name, content in rank_files.items():
            copied.append(({"kind": FILE, "name": name, "slice": ""}, content))
        self._copier.copy(header, copied)

    def checkpoint_of_copies(self) -> Storage:
        """Let the ranks write the newest copy of an ended attempt as a checkpoint; return where one is read."""
        disk = self._disk
        self._newest_step = 0
        written = None
        try:
            written = to_files(disk, self._copier.readable_slots, self._copier.storage)
        except CheckpointError as error:
            warn("%s\nThe job resumes from the disk.", error)
        if written is None:
            return disk
        step, source = written
        # By this, npurun knows how far the job is.
        note_progress(disk.rank, step)
        return source
