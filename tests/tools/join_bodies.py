"""A loop of ``test_joins.py``, as a script under npurun, whose nodes come and go, and as a body of pools."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import fit_checkpoint_bodies
import numpy as np
import tensorflow as tf

import npu_device as npu

SAMPLES, BATCH = 48, 6
EPOCH = SAMPLES // BATCH  # steps


class Loop:
    """A training from its beginning; each rank writes down the numbers of the samples of each step."""

    def __init__(
        self, directory: str, part: str = "", checkpoints: str | None = None, **options: Any
    ) -> None:
        self.here = Path(directory)
        self.part = part  # part of the training, whose lists of samples have this name
        numbers = tf.data.Dataset.range(SAMPLES).shuffle(SAMPLES, seed=3)
        numbers, batch = npu.distribute.shard_and_rebatch_dataset(numbers, BATCH)
        self.iterator = iter(numbers.repeat().batch(batch).prefetch(1))
        self.weights = tf.Variable(tf.linspace(0.1, 1.0, 7))
        self.moments = tf.Variable(tf.zeros(7))
        self.checkpoint = npu.train.JobCheckpoint(
            checkpoints or self.here / "checkpoints",
            weights=self.weights,
            moments=self.moments,
            per_rank={"iterator": self.iterator},
            **options,
        )

    def run(self, end: int, before_end_of: Any = None) -> list[np.ndarray]:
        """Train until ``end`` steps are over; call a function within each step, which may end the training."""
        start = self.checkpoint.restore()
        # By hand, the iterator is at its beginning.
        for _ in range(start if before_end_of is None else 0):
            next(self.iterator)
        path = self.here / f"samples.{self.part}.{npu.distribute.rank()}"
        with self.checkpoint, path.open("a") as samples:
            step = start
            for step in range(start + 1, end + 1):
                numbers = next(self.iterator)
                print(step, *numbers.numpy(), file=samples, flush=True)
                self._step(tf.cast(numbers, tf.float32))
                if before_end_of is not None and before_end_of(step):
                    break
                self.checkpoint.step_done(step)
            self.checkpoint.save(step)
        return [self.weights.numpy(), self.moments.numpy()]

    def _step(self, numbers: tf.Tensor) -> None:
        features = tf.sin(numbers[:, None] * tf.range(1.0, 8.0))
        errors = tf.linalg.matvec(features, self.weights) - numbers
        gradient = tf.reduce_mean(features * errors[:, None], axis=0)
        gradient = npu.distribute.all_reduce(gradient, reduction="mean")
        self.moments.assign(0.9 * self.moments + gradient)
        self.weights.assign_sub(0.01 * self.moments)


def body_by_hand(directory: str, end: int) -> list[np.ndarray]:
    """Resume, and stop after a step with a checkpoint."""
    return Loop(directory, preemption=False).run(end)


def body_fit_by_hand(directory: str, kind: str) -> dict[str, Any]:
    """Resume a ``fit``, with a checkpoint of each step."""
    return fit_checkpoint_bodies.fit(
        f"{directory}/checkpoints", kind, every=1, keep=100, preemption=False
    )


def main_fit(directory: str, kind: str, checkpoints: str) -> None:
    """Run a ``fit``, which waits in step 7 until there is a file ``go.7``."""
    here = Path(directory)
    npu.open().as_default()

    def wait() -> None:
        if os.environ["NPU_DEVICE_RESTART_COUNT"] == "0":
            (here / "at.7.0").touch()
            while not (here / "go.7").exists():
                time.sleep(0.02)

    watch = fit_checkpoint_bodies.Watch(7, wait)
    ran = fit_checkpoint_bodies.fit(checkpoints, kind, watch=watch)
    np.savez(here / f"values.{npu.distribute.rank()}.npz", *ran["values"])
    (here / "not_kept").write_text("\n".join(ran["not_kept"]))


def main() -> None:
    """Train for some steps. In those with a file ``wait.N``, wait for the file ``go.N``; end in that of ``last.N``.

    Arguments: a directory; the number of steps, or a kind of data for ``main_fit``; and where the checkpoints are.
    """
    directory, end, checkpoints = sys.argv[1:]
    if not end.isdecimal():
        main_fit(directory, end, checkpoints)
        return
    npu.open().as_default()
    loop = Loop(directory, os.environ["NPU_DEVICE_RESTART_COUNT"], checkpoints)

    def wait(step: int) -> bool:
        if (loop.here / f"wait.{step}").exists():
            (loop.here / f"at.{step}.{npu.distribute.rank()}").touch()
            while not (loop.here / f"go.{step}").exists():
                time.sleep(0.02)
        if (loop.here / "slow").exists():
            time.sleep(0.1)
        return (loop.here / f"last.{step}").exists()

    values = loop.run(int(end), wait)
    np.savez(loop.here / f"values.{npu.distribute.rank()}.npz", *values)


if __name__ == "__main__":
    main()
