"""``npu.train.JobCheckpoint``: one checkpoint of all ranks of a job."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.training.checkpoint import folder, selection
from npu_device._src.training.checkpoint.callback_states import NO_CALLBACKS
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.job_copies import JobCopies
from npu_device._src.training.checkpoint.memory_copies import copier_of
from npu_device._src.training.checkpoint.preemption import Preemption
from npu_device._src.training.checkpoint.progress import note_progress
from npu_device._src.training.checkpoint.selection import Storage, on_all_ranks
from npu_device._src.training.checkpoint.states import (
    Digests,
    RankState,
    SharedState,
    with_hidden_random_state,
)
from npu_device._src.training.opening import device
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.training.watching.partial_sums import for_all_ranks, means_of, with_values
from npu_device._src.version import __version__

_log = logging.getLogger("npu_device")


class JobCheckpoint:
    """Checkpoints of all ranks of a job together, for a custom training loop.

    Args:
        directory: directory of the checkpoints, the same path on every rank; created if it doesn't exist. Hosts that
            don't share it each write a complete checkpoint.
        every: steps between checkpoints that ``step_done`` writes; None: only the last one, when asked to stop.
        memory_every: steps between copies in memory that npurun holds until it ends; None for none. A restart by
            npurun resumes from the newest copy if it is newer than the checkpoints on the disk. See "Copies in memory"
            in docs/checkpoints.md.
        keep: number of checkpoints to keep, above 0.
        preemption: stop all ranks after the same step, with a checkpoint, when any of them is sent the signal that
            ``NPU_DEVICE_PREEMPT_SIGNAL`` names (SIGTERM by default); see ``step_done``. The handler of the
            signal is replaced until ``close``.
        per_rank: by name, objects of each rank: tf.data iterators, ``tf.random.Generator``,
            ``keras.random.SeedGenerator``, ``numpy.random.Generator`` and ``random.Random`` objects; optimizers whose
            state is sharded.
        shared: by name, objects that are the same on all ranks: models, optimizers, loss scales, variables.

    Attributes:
        notes: the notes of the checkpoint that was restored.
        not_kept: what ``restore`` could not restore, one sentence each.

    Raises:
        ValueError: ``every``, ``memory_every`` or ``keep`` is not positive.
        TypeError: something that can't be in a checkpoint.

    The random states of Python, numpy and TensorFlow's eager operations are kept for each rank, and so are variables
    among the shared ones that differ from those of rank 0 (seed generators, moving averages). Between two updates of an
    optimizer that adds up gradients, each rank's sums are kept, and for another number of ranks what one process has.
    Random operations of a graph that have no generator keep their state inside the operation, where it can't be read.

    Every rank has to make the calls, in the same order. They work on a single device too.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        memory_every: int | None = None,
        keep: int = 3,
        preemption: bool = True,
        per_rank: Mapping[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"keep and every must be at least 1; found keep={keep}, every={every}")
        if memory_every is not None and (type(memory_every) is not int or memory_every < 1):
            raise ValueError(
                "memory_every must be None, for no copies in memory, or a number of steps of at least 1; found "
                f"memory_every={memory_every!r}"
            )
        folder.require_local(directory)
        self.notes: dict[str, Any] = {}
        self.not_kept: tuple[str, ...] = ()
        self._directory = Path(directory).absolute()
        self._interval = every
        self._memory_interval = memory_every
        self._copies: JobCopies | None = None
        self._keep = keep
        self._shared = SharedState(shared)
        self._own_state = RankState(per_rank or {})
        self._warned = with_hidden_random_state({**shared, **(per_rank or {})})
        self._storage: Storage | None = None
        # The step of the newest checkpoint; None before restore and save.
        self._last_step: int | None = None
        # Steps of which latest.json may name one: what it named when this job last read it, or what this job wrote.
        self._named: set[int | None] = set()
        self._chosen: selection.Chosen | None = None  # what ``peek`` has chosen for ``restore``
        self._preemption: Preemption | None = None
        self._is_stopping = False
        if preemption and device.parent_of_this_process() is None:
            world = current_world()
            if threading.current_thread() is threading.main_thread():
                self._preemption = Preemption(world)
            else:
                text = "this thread can't handle %s. What to do: make the JobCheckpoint in the main thread."
                _log.warning(text, environment.NPU_DEVICE_PREEMPT_SIGNAL.get())

    def __enter__(self) -> JobCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the handler of the signal, and end the copies in memory; also at the end of a ``with`` block."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        if self._preemption is not None:
            self._preemption.close()

    def step_done(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Report that a step is over. Write a checkpoint every ``every`` steps; end the process when asked to stop.

        Args:
            step: how many steps are over.
            notes: for that checkpoint; see ``save``.

        Raises:
            SystemExit: any rank was sent the signal, or a node comes, and all ranks have written the checkpoint of this
                step, or npurun holds it in memory for the ranks that go on. The code is 75, by which ``npurun`` knows
                that the job can be resumed.
            CheckpointError: that checkpoint could not be written.

        If a checkpoint can't be written otherwise, a warning says so, and training goes on: the one before is still
        whole. A process that was sent the signal ends within ``NPU_DEVICE_PREEMPT_TIMEOUT`` seconds, and at once when
        it is sent a second one.
        """
        # A step may be a tensor or a number of numpy, which JSON doesn't write.
        step = int(step)
        notes = dict(notes or {})
        if self._preemption is not None and self._preemption.count_step():
            self._is_stopping = True
            self._prepare()
            is_copied = False
            if self._copies is not None:
                is_copied = self._copies.copy_last_step(step, notes, self._preemption)
            if not is_copied:
                self.save(step, notes)
            self._preemption.note_saved()
            _log.info("stopped after step %d, as asked", step)
            raise SystemExit(RESUMABLE)
        last_step = self._last_step or 0
        # Intervals are compared, not remainders, because a step may stand for several.
        if self._interval is not None and step // self._interval > last_step // self._interval:
            self.try_to_save(step, notes)
        elif self._memory_interval is not None:
            self._prepare()
            if self._copies is not None:
                self._copies.copy_if_due(step, last_step, notes)

    def try_to_save(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint now, as ``save`` does; if it can't be written, warn instead of raising CheckpointError.

        Args:
            step, notes: as in ``save``.

        Raises:
            TypeError: JSON has no form for the notes.
            RuntimeError: as in ``save``.
        """
        try:
            self.save(step, notes)
        except CheckpointError as error:
            # A failed save isn't tried again before the next interval.
            self._last_step = step
            selection.warn("%s\nTraining goes on; the newest checkpoint is an older one.", error)

    @for_all_ranks.on()
    def save(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint now.

        Args:
            step: how many steps are over; the same on all ranks.
            notes: values for JSON to find in ``notes`` after ``restore``; those of rank 0 are kept.

        Raises:
            CheckpointError: a rank could not write its state, or another job writes there; on all ranks. The checkpoint
                before is still whole and the latest.
            TypeError: JSON has no form for the notes.
            RuntimeError: the directory holds checkpoints of another run; the ranks save different steps, or
                variables of different shapes.
        """
        step = int(step)
        notes = dict(notes or {})
        try:
            json.dumps(notes)
        except TypeError as error:
            raise TypeError(
                f"the notes of a checkpoint must be values for JSON: {error}"
            ) from error
        storage = self._prepare()
        # Their best weights are among the shared variables from now on.
        self._own_state.callbacks.collect()
        differing = self._compare(storage, step)
        # What this job leaves from here on is no obstacle to its next save.
        self._last_step = self._last_step or 0
        partial_sums = self._shared.partial_sums()
        means = means_of([*partial_sums.values()])
        partial = storage.partial(step)
        problem = f"the checkpoint of step {step} could not be written to {self._directory}:"
        write = functools.partial(self._write, partial, storage, differing, partial_sums, means)
        try:
            written = on_all_ranks(storage.world, write, problem)
            files = {}
            for rank, entries in enumerate(written):
                if storage.keepers[rank] == storage.rank:
                    files.update(entries)
            manifest = self._manifest(notes, list(self._shared.variables()))
            complete = functools.partial(self._completed, step, {**manifest, "files": files})
            problem = f"the checkpoint of step {step} could not be completed in {self._directory}:"
            selection.complete(storage, step, self._keep, complete, problem)
        except CheckpointError:
            # Only the keeper removes, after all ranks have ended their attempt.
            if storage.is_keeper:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            self._own_state.callbacks.arrays.clear()
        self._last_step = step
        self._named = {step}
        note_progress(storage.rank, step)
        # What ranks before these have left in memory is older now.
        if self._copies is not None:
            self._copies.free()

    def peek(self) -> dict[str, Any] | None:
        """Return the notes of the checkpoint that ``restore`` will restore; None if there is none. Copies in memory are
        made a checkpoint here.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
        """
        storage = self._prepare()
        source = storage
        if self._copies is not None:
            source = self._copies.checkpoint_of_copies()
        if storage.is_keeper:
            selection.warn_of_remains(folder.tidy(self._directory, but=storage.token))
            self._named = {folder.readable_latest(self._directory)}
        chosen = selection.newest_whole(source)
        self._chosen = chosen
        if chosen is None:
            return None
        own_prefix = None
        if chosen.is_complete:
            own_prefix = chosen.folder / folder.own_prefix(storage.rank)
        manifest = chosen.manifest
        self._own_state.expect(own_prefix, manifest.get("callbacks", NO_CALLBACKS))
        notes: dict[str, Any] = manifest["notes"]
        return notes

    @for_all_ranks.on()
    def restore(self) -> int:
        """Restore the newest checkpoint that is whole on all ranks.

        Returns:
            Its step, the same on all ranks; 0 if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be used, or it doesn't fit the model of the script.

        A damaged checkpoint is left out with a warning that names the file. With another number of ranks, what all
        ranks share is restored, and a warning says what could not be kept.
        """
        step = self._restore_state()
        self._reserve()
        return step

    @for_all_ranks.on()
    def _restore_state(self) -> int:
        """Restore, and leave it to the caller to ``_reserve`` memory when all variables exist."""
        self._prepare()
        if self._chosen is None:
            # Without an earlier ``peek``, the newest checkpoint is restored.
            self.peek()
        chosen = self._chosen
        self._chosen = None
        if chosen is None:
            self._last_step = 0
            return 0
        storage = chosen.storage
        world = storage.world
        directory = storage.directory
        received_folder = storage.partial(chosen.step)
        # All folders in memory have the same files.
        is_sent = not chosen.is_complete and directory == self._directory
        # Ranks that read no state of their own need a copy of the holder's shared state.
        needs_copy = is_sent and storage.keepers[chosen.holder] != storage.keepers[storage.rank]
        manifest = chosen.manifest
        lost = list(chosen.not_kept)
        problem = f"the checkpoint of step {chosen.step} in {directory} can't be read:"
        source = received_folder if needs_copy else chosen.folder

        def read() -> None:
            lost.extend(self._shared.read(source / folder.SHARED, manifest))
            if chosen.is_complete:
                prefix = chosen.folder / folder.own_prefix(storage.rank)
                not_kept, partial_sums = self._own_state.read(prefix, self._shared.variables())
                lost.extend(not_kept)
                if world is not None:
                    self._shared.note_partial_sums(world, partial_sums)

        try:
            if is_sent and world is not None and storage.has_copies:
                receives = needs_copy and storage.is_keeper
                selection.send_files(world, source, chosen.shared_files, chosen.holder, receives)
                # The files have to be there before any rank of that host reads them.
                world.wait()
            on_all_ranks(world, read, problem)
            if not chosen.is_complete:
                samples = manifest.get("samples", [])
                lost += self._own_state.begin_anew(world, chosen.step, samples)
        finally:
            if storage.is_keeper:
                # What has been sent here was for this rank's restore only.
                shutil.rmtree(received_folder, ignore_errors=True)
                # If tf-keras reads some variables later, npurun removes the files in memory before it ends.
                if directory != self._directory and not self._shared.is_waiting:
                    shutil.rmtree(directory, ignore_errors=True)
        self._last_step = chosen.step
        self.notes = manifest["notes"]
        self.not_kept = tuple(lost)
        _log.info("restored the checkpoint of step %d from %s", chosen.step, chosen.folder)
        if lost:
            selection.warn(
                "the checkpoint of step %d is restored, except for\n  %s",
                chosen.step,
                "\n  ".join(lost),
            )
        return chosen.step

    def _reserve(self) -> None:
        """Check, before the first step, that the host has memory for the copies of all variables."""
        self._prepare()
        if self._copies is not None:
            self._copies.reserve()

    # Parts of saving

    def _prepare(self) -> Storage:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "JobCheckpoint works in eager mode, between the steps; found a graph.\nWhat to do: call it outside of "
                "tf.function; in a session of TensorFlow 1 use tf.compat.v1.train.Saver."
            )
        if self._storage is None:
            self._storage = selection.find_storage(current_world(), self._directory)
            if self._memory_interval is not None or self._preemption is not None:
                interval = self._memory_interval
                copier = copier_of(self._storage, is_demanded=interval is not None)
                if copier is not None:
                    self._copies = JobCopies(
                        self._storage,
                        copier,
                        interval,
                        self._shared,
                        self._own_state,
                        self._keep,
                        self._manifest,
                    )
            self._named = {folder.readable_latest(self._directory)}
            if self._warned:
                selection.warn(
                    "the random state of %s can't be kept in a checkpoint, so a resumed run draws different numbers.\n"
                    "What to do: call tf.keras.backend.experimental.enable_tf_random_generator() before the model is "
                    "made.",
                    ", ".join(self._warned),
                )
        return self._storage

    def _compare(self, storage: Storage, step: int) -> dict[str, Any]:
        """Check that all ranks save the same; return the variables whose values the keeper of this directory lacks."""
        own_digests: Digests = {} if storage.world is None else self._shared.digests()
        newest = -1
        if storage.is_keeper and self._last_step is None:
            # The directory is looked at only before the first save: what this job has written itself is no obstacle.
            newest = max(folder.steps(self._directory)[0], default=-1)
        sent_digests = own_digests if storage.is_keeper else None
        answers = storage.gather((step, newest, sent_digests))
        steps = [rank_step for rank_step, _, _ in answers]
        if len(set(steps)) > 1:
            texts = [f"rank {rank}: {rank_step}" for rank, rank_step in enumerate(steps)]
            raise RuntimeError(
                f"the ranks save different steps: {', '.join(texts)}.\n"
                "What to do: give every rank the same number of steps."
            )
        newest = max(newest_of_rank for _, newest_of_rank, _ in answers)
        if newest >= 0:
            raise RuntimeError(
                f"{self._directory} holds checkpoints of a run, the newest of step {newest}, which this one would "
                "replace.\nWhat to do: call restore() before the first step, or use another directory."
            )
        written: Digests = answers[storage.keepers[storage.rank]][2]
        problem = None
        for path, (shape, _) in own_digests.items():
            # Values may differ, since each rank writes its own then; shapes may not.
            if path not in written or written[path][0] != shape:
                problem = path
                break
        lines = []
        for rank, path in enumerate(storage.gather(problem)):
            if path is not None:
                lines.append(f"  rank {rank}: {path}")
        if lines:
            raise RuntimeError(
                "what all ranks share has variables that lower ranks don't have, or in another shape:\n"
                + "\n".join(lines)
                + "\nWhat to do: name what is different on each rank (sharded optimizers) in per_rank."
            )
        if not own_digests:
            return {}
        variables = self._shared.variables()
        return {path: variables[path] for path in own_digests if own_digests[path] != written[path]}

    def _write(
        self,
        partial: Path,
        storage: Storage,
        differing: Mapping[str, Any],
        partial_sums: Mapping[str, Any],
        means: Sequence[tf.Tensor],
    ) -> dict[str, Any]:
        """Write the files of this rank; ``means`` are what one process has in the variables ``partial_sums``."""
        partial.mkdir(exist_ok=True)
        prefix = folder.own_prefix(storage.rank)
        own_variables = {**differing, **partial_sums}
        self._own_state.write(partial / prefix, own_variables, [*partial_sums])
        written = folder.sync_files(partial, prefix)
        if storage.is_keeper:
            with with_values([*partial_sums.values()], means):
                self._shared.checkpoint().write(str(partial / folder.SHARED))
            written |= folder.sync_files(partial, folder.SHARED)
        return written

    def _completed(self, step: int, manifest: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest; CheckpointError if another job has named a checkpoint since this one has."""
        # The file is read before each change, since two jobs may have been given one directory.
        named = folder.readable_latest(self._directory)
        if named not in self._named:
            raise CheckpointError(
                f"another job writes checkpoints there: it has named step {named} the latest. What to do: stop one of "
                "the two, and give each a directory of its own"
            )
        # A keeper names it even if another one then can't.
        self._named.add(step)
        return manifest

    def _manifest(self, notes: Any, paths: list[str]) -> dict[str, Any]:
        storage = self._prepare()
        samples = []
        # Another number of ranks finds the places of iterators by what these would read next.
        if self._is_stopping:
            samples = storage.gather(self._own_state.next_samples())
        if None in samples:
            samples = []
        return {
            "samples": samples,
            "world_size": len(storage.keepers),
            "versions": {"npu_device": __version__, "tensorflow": tf.__version__},
            "notes": notes,
            "callbacks": self._own_state.callbacks.text,
            "variables": sorted(paths),
            "trained": self._shared.trained(),
        }
