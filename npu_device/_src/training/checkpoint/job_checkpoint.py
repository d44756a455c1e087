"""``npu.train.JobCheckpoint``: one checkpoint of all ranks of a job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.training.checkpoint import folder, selection
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.parts import Digests, Own, Shared, with_hidden_random_state
from npu_device._src.training.checkpoint.preemption import Preemption
from npu_device._src.training.checkpoint.selection import Place, everybody, on_all_ranks
from npu_device._src.training.opening import device
from npu_device._src.training.opening.current_world import world
from npu_device._src.training.watching.own_parts import for_all_ranks, means_of, with_values
from npu_device._src.version import __version__
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")


class JobCheckpoint:
    """Checkpoints of all ranks of a job together, for a custom training loop.

    Args:
        directory: directory of the checkpoints, the same path on every rank; created if it doesn't exist. Hosts that
            don't share it each write a complete checkpoint.
        every: steps between checkpoints that ``step_done`` writes; None: only the last one, when asked to stop.
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
        ValueError: ``every`` or ``keep`` is not positive.
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
        keep: int = 3,
        preemption: bool = True,
        per_rank: Mapping[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"keep and every must be at least 1; found keep={keep}, every={every}")
        self.notes: dict[str, Any] = {}
        self.not_kept: tuple[str, ...] = ()
        self._directory = Path(directory).absolute()
        self._every = every
        self._keep = keep
        self._shared = Shared(shared)
        self._own = Own(per_rank or {})
        self._warned = with_hidden_random_state({**shared, **(per_rank or {})})
        self._ranks: World | None = None
        self._place: Place | None = None
        self._last: int | None = (
            None  # the step of the newest checkpoint; None before restore and save
        )
        self._named: int | None = None  # by latest.json, when this job last read or wrote it
        self._found: selection.Chosen | None = None  # by peek, for restore
        self._preemption: Preemption | None = None
        if preemption and device.parent_of_this_process() is None:
            ranks = world()
            health, size = (None, 1) if ranks is None else (ranks.job.health, ranks.size)
            number = signal.Signals[environment.NPU_DEVICE_PREEMPT_SIGNAL.get()]
            try:
                self._preemption = Preemption(
                    health, size, number, environment.NPU_DEVICE_PREEMPT_TIMEOUT.get()
                )
            except ValueError:
                what = "this thread can't handle %s. What to do: make the JobCheckpoint in the main thread."
                _log.warning(what, number.name)

    def __enter__(self) -> JobCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the handler of the signal; also at the end of a ``with`` block."""
        if self._preemption is not None:
            self._preemption.close()

    def step_done(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Report that a step is over. Write a checkpoint every ``every`` steps; end the process when asked to stop.

        Args:
            step: how many steps are over.
            notes: for that checkpoint; see ``save``.

        Raises:
            SystemExit: any rank was sent the signal, and all ranks have written the checkpoint of this step. The code
                is 75, by which ``npurun`` knows that the job can be resumed.
            CheckpointError: that checkpoint could not be written.

        If a checkpoint can't be written otherwise, a warning says so, and training goes on: the one before is still
        whole. A process that was sent the signal ends within ``NPU_DEVICE_PREEMPT_TIMEOUT`` seconds, and at once when
        it is sent a second one.
        """
        step = int(step)
        if self._preemption is not None and self._preemption.is_last_step():
            self.save(step, notes)
            self._preemption.has_saved()
            _log.info("stopped after step %d, as asked", step)
            raise SystemExit(RESUMABLE)
        if self._every is not None and step // self._every > (self._last or 0) // self._every:
            self.try_to_save(step, notes)

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
            self._last = step
            if self._ranks is None or self._ranks.is_main:
                _log.warning("%s\nTraining goes on; the newest checkpoint is an older one.", error)

    @for_all_ranks()
    def save(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint now.

        Args:
            step: how many steps are over; the same on all ranks.
            notes: values for JSON to find in ``notes`` after ``restore``; those of rank 0 are kept.

        Raises:
            CheckpointError: a rank could not write its part, or another job writes there; on all ranks. The checkpoint
                before is still whole and the latest.
            TypeError: JSON has no form for the notes.
            RuntimeError: the directory holds checkpoints of another run; the ranks save different steps, or
                variables of different shapes.
        """
        step, notes = int(step), dict(notes or {})
        try:
            json.dumps(notes)
        except TypeError as error:
            raise TypeError(
                f"the notes of a checkpoint must be values for JSON: {error}"
            ) from error
        ranks, place = self._prepare()
        differing = self._compare(ranks, place, step)
        parts = {} if ranks is None else self._shared.parts()
        means = means_of([*parts.values()])
        partial = self._directory / folder.partial_name(step, place.token)
        what = f"the checkpoint of step {step} could not be written to {self._directory}:"
        try:
            written = on_all_ranks(
                ranks, lambda: self._write(partial, place, differing, parts, means), what
            )
            files = {
                name: entry
                for rank, entries in enumerate(written)
                if place.keepers[rank] == place.rank
                for name, entry in entries.items()
            }
            self._name(ranks, place, step, partial, files, notes)
        except CheckpointError:
            if place.is_keeper:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._last = step
        progress = environment.NPU_DEVICE_PROGRESS_FILE.get()
        if progress is not None and (ranks is None or ranks.is_main):
            try:
                Path(f"{progress}.part").write_text(f"{step}\n", encoding="utf-8")
                os.replace(f"{progress}.part", progress)
            except OSError as error:
                _log.warning("npurun can't be told of the checkpoint of step %d: %s", step, error)

    def peek(self) -> dict[str, Any] | None:
        """Return the notes of the checkpoint that ``restore`` will restore; None if there is none.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
        """
        ranks, place = self._prepare()
        if place.is_keeper:
            _warn_each(folder.tidy(self._directory, but=place.token))
            self._named = _latest(self._directory)
        self._found = selection.newest_whole(ranks, place, self._directory)
        return None if self._found is None else self._found.notes

    @for_all_ranks()
    def restore(self) -> int:
        """Restore the newest checkpoint that is whole on all ranks.

        Returns:
            Its step, the same on all ranks; 0 if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be used, or it doesn't fit the model of the script.

        A damaged checkpoint is left out with a warning that names the file. With another number of ranks, what all
        ranks share is restored, and a warning says what could not be kept.
        """
        if self._found is None:
            self.peek()
        chosen, self._found = self._found, None
        ranks, place = self._prepare()
        if chosen is None:
            self._last = 0
            return 0
        here = self._directory / folder.name_of(chosen.step)
        borrowed = self._directory / folder.partial_name(chosen.step, place.token)
        takes = not chosen.own and place.keepers[chosen.holder] != place.keepers[place.rank]
        lost = list(chosen.not_kept)
        what = f"the checkpoint of step {chosen.step} in {self._directory} can't be read:"
        source = borrowed if takes else here

        def read() -> None:
            lost.extend(self._shared.read(source / folder.SHARED, chosen.variables))
            if chosen.own:
                prefix = here / folder.own_prefix(place.rank)
                not_kept, parts = self._own.read(prefix, self._shared.variables())
                lost.extend(not_kept)
                if ranks is not None:
                    self._shared.note_parts(ranks, parts)
            else:
                lost.extend(self._own.names_of_states())

        try:
            if not chosen.own and ranks is not None and len(set(place.keepers)) > 1:
                selection.send_files(
                    ranks, source, chosen.shared, chosen.holder, takes and place.is_keeper
                )
                ranks.wait()
            on_all_ranks(ranks, read, what)
        finally:
            if place.is_keeper:
                shutil.rmtree(borrowed, ignore_errors=True)
        self._last = chosen.step
        self.notes, self.not_kept = chosen.notes, tuple(lost)
        _log.info("restored the checkpoint of step %d from %s", chosen.step, here)
        if lost and place.rank == 0:
            _log.warning(
                "the checkpoint of step %d is restored, except for\n  %s",
                chosen.step,
                "\n  ".join(lost),
            )
        return chosen.step

    # Parts of saving

    def _prepare(self) -> tuple[World | None, Place]:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "JobCheckpoint works in eager mode, between the steps; found a graph.\nWhat to do: call it outside of "
                "tf.function; in a session of TensorFlow 1 use tf.compat.v1.train.Saver."
            )
        if self._place is None:
            self._ranks = world()
            self._place = selection.find_place(self._ranks, self._directory)
            self._named = _latest(self._directory)
            names, self._warned = self._warned, []
            if names and self._place.rank == 0:
                _log.warning(
                    "the random state of %s can't be kept in a checkpoint, so a resumed run draws different numbers.\n"
                    "What to do: call tf.keras.backend.experimental.enable_tf_random_generator() before the model is "
                    "made.",
                    ", ".join(names),
                )
        return self._ranks, self._place

    def _compare(self, ranks: World | None, place: Place, step: int) -> dict[str, Any]:
        """Check that all ranks save the same; return the variables whose values the keeper of this directory lacks."""
        mine: Digests = {} if ranks is None else self._shared.digests()
        there = (
            folder.steps(self._directory)[0][:1] if place.is_keeper and self._last is None else []
        )
        found = everybody(ranks, (step, there, mine if place.is_keeper else None))
        if len({its for its, _, _ in found}) > 1:
            raise RuntimeError(
                "the ranks save different steps: "
                + ", ".join(f"rank {rank}: {its}" for rank, (its, _, _) in enumerate(found))
                + ".\nWhat to do: give every rank the same number of steps."
            )
        newest = [its for _, some, _ in found for its in some]
        if newest:
            raise RuntimeError(
                f"{self._directory} holds checkpoints of a run, the newest of step {max(newest)}, which this one would "
                "replace.\nWhat to do: call restore() before the first step, or use another directory."
            )
        written: Digests = found[place.keepers[place.rank]][2]
        problem = next(
            (path for path in mine if path not in written or written[path][0] != mine[path][0]),
            None,
        )
        lines = [
            f"  rank {rank}: {path}"
            for rank, path in enumerate(everybody(ranks, problem))
            if path is not None
        ]
        if lines:
            raise RuntimeError(
                "what all ranks share has variables that lower ranks don't have, or in another shape:\n"
                + "\n".join(lines)
                + "\nWhat to do: name what is different on each rank (sharded optimizers) in per_rank."
            )
        variables = self._shared.variables() if mine else {}
        return {path: variables[path] for path, digest in mine.items() if digest != written[path]}

    def _write(
        self,
        partial: Path,
        place: Place,
        differing: Mapping[str, Any],
        parts: Mapping[str, Any],
        means: Sequence[tf.Tensor],
    ) -> dict[str, Any]:
        """Write the files of this rank; ``means`` are what one process has in the variables ``parts``."""
        partial.mkdir(exist_ok=True)
        prefix = folder.own_prefix(place.rank)
        self._own.write(partial / prefix, {**differing, **parts}, [*parts])
        written = folder.sync_files(partial, prefix)
        if place.is_keeper:
            with with_values([*parts.values()], means):
                self._shared.write(partial / folder.SHARED)
            written |= folder.sync_files(partial, folder.SHARED)
        return written

    def _name(
        self, ranks: World | None, place: Place, step: int, partial: Path, files: Any, notes: Any
    ) -> None:
        manifest = {
            "world_size": len(place.keepers),
            "versions": {"npu_device": __version__, "tensorflow": tf.__version__},
            "notes": notes,
            "variables": sorted(self._shared.variables()),
            "files": files,
        }
        what = f"the checkpoint of step {step} could not be completed in {self._directory}:"

        def finish() -> None:
            found = _latest(self._directory)
            if found != self._named:
                raise CheckpointError(
                    f"another job writes checkpoints there: it has named step {found} the latest. What to do: stop one "
                    "of the two, and give each a directory of its own"
                )
            folder.finish(self._directory, partial.name, step, manifest)

        def name_latest() -> None:
            folder.name_latest(self._directory, step)
            self._named = step
            _warn_each(folder.keep_only(self._directory, step, self._keep))

        for stage in (finish, name_latest):
            on_all_ranks(ranks, stage if place.is_keeper else lambda: None, what)


def _latest(directory: Path) -> int | None:
    with contextlib.suppress(CheckpointError):
        return folder.latest(directory)
    return None


def _warn_each(problems: list[str]) -> None:
    for problem in problems:
        _log.warning("an old checkpoint can't be removed: %s", problem)
