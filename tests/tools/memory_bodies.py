"""Bodies of ``test_memory_copies.py``: a ``fit`` that copies its state into memory and is interrupted."""

from __future__ import annotations

import gc
import io
import itertools
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import fit_checkpoint_bodies as bodies
import pytest
import tensorflow as tf
from caught_messages import error_of, settings, warnings_of_package
from rank_comparison import same_bits

import npu_device as npu
from npu_device._src.training.checkpoint import copies_to_disk, memory_copies
from npu_device._src.training.checkpoint.memory_slots import close_slots, open_slots
from npu_device._src.training.checkpoint.selection import Storage
from npu_device._src.training.opening.current_world import current_world


class Interrupted(Exception):
    pass


def body_interrupted(addresses: list[str], directory: str, after: int) -> str:
    """Train until some steps are done, given the memory of each rank's host; return what is printed."""

    def interrupt() -> None:
        raise Interrupted

    output = io.StringIO()
    with (
        settings(NPU_DEVICE_MEMORY_COPIES=addresses[npu.distribute.rank()]),
        redirect_stderr(output),
        pytest.raises(Interrupted),
    ):
        watch = bodies.Watch(after, interrupt)
        _fit(directory, watch=watch, memory_every=2)
    return output.getvalue()


def body_whole(addresses: list[str], directory: str) -> dict[str, Any]:
    """Go on to the end, as after a restart."""
    address = addresses[npu.distribute.rank()]
    with settings(NPU_DEVICE_MEMORY_COPIES=address, NPU_DEVICE_RESTART_COUNT="1"):
        return _fit(directory, memory_every=2)


def body_after_another_training(addresses: list[str], directory: str) -> list[int]:
    """Return at which steps trainings of one script begin: the second after the directory of the first is removed, the
    third after a restart in the second, and the fourth after a restart right after the directory is removed again.
    """
    begins = []
    for attempt, steps, is_ended in (
        ("0", 3, True),
        ("0", 1, False),
        ("1", 0, True),
        ("2", 1, True),
    ):
        variable = tf.Variable([1.0], shape=[None])  # as a table that grows
        with (
            settings(
                NPU_DEVICE_MEMORY_COPIES=addresses[npu.distribute.rank()],
                NPU_DEVICE_RESTART_COUNT=attempt,
            ),
            npu.train.JobCheckpoint(
                directory, memory_every=1, preemption=False, v=variable
            ) as checkpoint,
        ):
            begins.append(checkpoint.restore())
            for step in range(1, steps + 1):
                checkpoint.step_done(step)
                _wait_for_copy(checkpoint)
        if is_ended:
            _remove(directory)
    return begins


def _wait_for_copy(checkpoint: npu.train.JobCheckpoint) -> None:
    while checkpoint._copies is not None and checkpoint._copies._copier.is_busy:
        time.sleep(0.01)


def body_two_directories(addresses: list[str], directory: str) -> None:
    """Copy step 1 of two trainings, which have all but their directories in common, and remove one of these."""
    variable = tf.Variable(tf.zeros([1_000_000]))
    with settings(NPU_DEVICE_MEMORY_COPIES=addresses[npu.distribute.rank()]):
        for name in ("removed", "stays"):
            with npu.train.JobCheckpoint(
                f"{directory}/{name}", memory_every=1, preemption=False, v=variable
            ) as checkpoint:
                checkpoint.restore()
                checkpoint.step_done(1)
    _remove(f"{directory}/removed")


def _remove(directory: str) -> None:
    npu.distribute.barrier()
    if npu.distribute.is_main():
        shutil.rmtree(directory)
    npu.distribute.barrier()


def body_undisturbed(directory: str) -> dict[str, Any]:
    """Train without npurun, which is told once."""
    with warnings_of_package() as texts:
        ran = _fit(directory, memory_every=2)
    return {**ran, "warnings": texts}


def _fit(directory: str, **options: Any) -> dict[str, Any]:
    # With this seed, the epochs of four ranks, of six samples each, begin with different ones, by which they are told.
    options.setdefault("seed", 5)
    # Seed generators of dropout differ between the ranks, and so do moving statistics.
    return bodies.fit(directory, "own", preemption=False, each_epoch=False, **options)


def body_to_disk(addresses: list[str]) -> None:
    """Write the copies as npurun lets a process of each host do before it ends, given their memory."""
    address = addresses[npu.distribute.rank()]
    slots = list(itertools.chain(*open_slots(address))) if address else []
    with settings(NPU_DEVICE_RESTART_COUNT="1"):
        copies_to_disk.write_newest(current_world(), slots)
    close_slots(slots)


def body_wrong(directory: str, wrong: Any) -> str:
    return error_of(npu.train.JobCheckpoint, directory, memory_every=wrong)


def body_too_large(address: str) -> str:
    """Return the error of a state that no host has memory for."""
    with settings(NPU_DEVICE_MEMORY_COPIES=address):
        copier = memory_copies.copier_of(Storage(Path(), "", (0,), 0), True)
    assert copier is not None
    text = error_of(copier.require_memory, 1 << 50, 10)
    copier.close()
    return text


def body_dropped(address: str, directory: str) -> int:
    """Return how many descriptors stay open when checkpoints are dropped without ``close``."""

    def train() -> None:
        checkpoint = npu.train.JobCheckpoint(
            directory, memory_every=1, preemption=False, v=tf.Variable(0.0)
        )
        step = checkpoint.restore() + 1
        checkpoint.save(step)

    def open_descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with settings(NPU_DEVICE_MEMORY_COPIES=address):
        train()
        before = open_descriptors()
        train()
        return open_descriptors() - before


def body_full(address: str, directory: str) -> list[str]:
    """Train with files that may not grow, as if the memory were full; return what is warned of."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    variable = tf.Variable(tf.zeros([100_000]))
    with (
        settings(NPU_DEVICE_MEMORY_COPIES=address),
        warnings_of_package() as texts,
        npu.train.JobCheckpoint(
            directory, memory_every=1, preemption=False, v=variable
        ) as checkpoint,
    ):
        checkpoint.restore()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        try:
            for step in range(1, 4):
                checkpoint.step_done(step)
                # The copy fails in its thread.
                _wait_for_copy(checkpoint)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        checkpoint.save(3)
    return texts


def body_no_temporary_files(addresses: list[str], directory: str) -> list[str]:
    """Train while rank 1 can't write temporary files, until it is asked to stop; return what is warned of."""
    iterator = iter(tf.data.Dataset.range(1000))
    variable = tf.Variable([1.0], shape=tf.TensorShape(None))
    rank = npu.distribute.rank()
    usual = tempfile.gettempdir()
    with (
        settings(NPU_DEVICE_MEMORY_COPIES=addresses[rank], NPU_DEVICE_PREEMPT_SIGNAL="SIGUSR1"),
        warnings_of_package() as texts,
        npu.train.JobCheckpoint(
            directory, memory_every=1, v=variable, per_rank={"iterator": iterator}
        ) as checkpoint,
    ):
        checkpoint.restore()
        if rank == 1:
            tempfile.tempdir = f"{directory}/missing"
        try:
            with pytest.raises(SystemExit, match="75"):
                for step in range(1, 900):
                    next(iterator)
                    if (rank, step) == (1, 3):
                        os.kill(os.getpid(), signal.SIGUSR1)
                    checkpoint.step_done(step)
        finally:
            tempfile.tempdir = usual
    return texts


def end_without_close(directory: str) -> None:
    """End the script right after a copy has begun."""
    variable = tf.Variable(tf.ones([30_000_000]))
    checkpoint = npu.train.JobCheckpoint(directory, memory_every=1, preemption=False, v=variable)
    checkpoint.restore()
    checkpoint.step_done(1)


class _Slow(bodies.Watch):
    """Takes so long for a step that a copy reaches the other host before the next one."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.5)
        super().on_train_batch_end(batch, logs)


def main() -> None:
    """Train under npurun; a rank, or npurun on its host, is killed at a step, or npurun is interrupted there, and the
    job goes on with the same bits.

    Arguments: the directory, the rank, what is done, and perhaps the steps between checkpoints on the disk.
    """
    directory, victim, killed, *every = sys.argv[1:]
    npu.open().as_default()
    if killed == "nothing":
        return end_without_close(directory)
    # npurun that is started again by hand has the same count.
    is_first = os.environ["NPU_DEVICE_RESTART_COUNT"] == "0" and not os.path.exists(
        f"{directory}/parts/latest.json"
    )
    is_hit = is_first and npu.distribute.rank() == int(victim)
    number = os.getpid() if killed == "rank" else os.getppid()
    kind = _Slow if is_first and killed != "rank" else bodies.Watch
    signal_number = signal.SIGINT if killed == "interrupt" else signal.SIGKILL
    watch = kind(8 if is_hit else 0, lambda: os.kill(number, signal_number))
    parts = _fit(
        f"{directory}/parts", watch=watch, memory_every=2, every=int(every[0]) if every else None
    )
    whole = _fit(f"{directory}/whole")
    assert parts["not_kept"] == (), parts["not_kept"]
    same_bits(whole["values"], parts["values"])


if __name__ == "__main__":
    main()
