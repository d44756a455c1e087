"""Bodies and scripts of ``test_job_checkpoint.py``: a small model with shuffling, dropout and moving averages."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, settings, warnings_of_package
from fit_models import descend
from rank_comparison import same_bits

import npu_device as npu
from npu_device._src import compat
from npu_device._src.training.checkpoint import next_samples, preemption
from npu_device._src.training.opening.current_world import current_world

STEPS = 8
SAMPLES = 40


@contextlib.contextmanager
def random_generators() -> Iterator[None]:
    """Let tf-keras's dropout draw from generators that a checkpoint can keep, while the block runs."""
    experimental = getattr(tf.keras.backend, "experimental", None)  # tf-keras only
    if experimental is not None:
        experimental.enable_tf_random_generator()
    try:
        yield
    finally:
        if experimental is not None:
            experimental.disable_tf_random_generator()


@contextlib.contextmanager
def file_sizes(most: int | None) -> Iterator[None]:
    """Limit the size of a file, as a full disk does, while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if most is None else most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Training:
    """A script with a loop of its own, from its beginning."""

    def __init__(self, directory: str, width: int = 6, **options: Any) -> None:
        keras, rank = tf.keras, npu.distribute.rank()
        keras.utils.set_random_seed(1 + rank)  # other noise on each rank
        with random_generators():
            layers = keras.layers
            hidden = [
                layers.Dense(width, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
            ]
            self.model = keras.Sequential([keras.Input([4]), *hidden, layers.Dense(2)])
        self.optimizer = keras.optimizers.Adam(0.01)
        self.signal_at = 0
        data = tf.random.stateless_normal([SAMPLES, 4], [1, 2])
        dataset, batch = npu.distribute.shard_and_rebatch_dataset(
            tf.data.Dataset.from_tensor_slices(data), 12
        )
        self.iterator = iter(dataset.shuffle(20).repeat().batch(batch))
        self.noise = tf.random.Generator.from_seed(5 + rank)
        things = {"model": self.model, "optimizer": self.optimizer}
        per_rank = {"iterator": self.iterator, "noise": self.noise}
        self.checkpoint = npu.train.JobCheckpoint(directory, per_rank=per_rank, **things, **options)
        npu.distribute.broadcast(list(self.model.weights))

        @tf.function(autograph=False)  # which would take most of the time
        def step(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
            def loss() -> tf.Tensor:
                return tf.reduce_mean(
                    tf.square(self.model(x + self.noise.normal(x.shape), training=True) - scale)
                )

            return descend(self.model, loss, self.optimizer, npu.distribute.all_reduce)

        self._step = step

    def run(self, end: int) -> dict[str, Any]:
        """Restore, and train until ``end`` steps are over."""
        start = self.checkpoint.restore()
        losses = []
        for done in range(start + 1, end + 1):
            if done == self.signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(self._step(next(self.iterator), np.float32(np.random.uniform()))))
            self.checkpoint.step_done(done)
        self.checkpoint.close()
        return self.outcome(start, losses)

    def outcome(self, start: int, losses: list[float]) -> dict[str, Any]:
        state = [
            variable.numpy()
            for variable in compat.optimizer_variables(self.optimizer, self.model.weights)
        ]
        return {
            "start": start,
            "losses": losses,
            "weights": [*map(np.asarray, self.model.get_weights()), *state],
        }


def body_loop(directory: str, end: int, disks: bool = False) -> dict[str, Any]:
    """Train up to a step, with a checkpoint every second one; on ``disks``, each rank has a directory of its own."""
    place = f"{directory}/{npu.distribute.rank()}" if disks else directory
    with warnings_of_package() as texts:
        training = Training(place, every=2)
        result = training.run(end)
    return {**result, "warnings": texts, "not_kept": training.checkpoint.not_kept}


def body_restore(directory: str) -> dict[str, Any]:
    with warnings_of_package() as texts:
        training = Training(directory, preemption=False)
        try:
            start: Any = training.checkpoint.restore()
        except npu.train.CheckpointError as error:
            start = str(error)
    return {
        **training.outcome(start, []),
        "warnings": texts,
        "not_kept": training.checkpoint.not_kept,
    }


def body_forgotten(directory: str) -> str:
    return error_of(Training(directory, preemption=False).checkpoint.save, 1)


def body_full_disk(directory: str) -> dict[str, Any]:
    """Save; on a full disk of one rank, for the manifest, and for the name; with bad notes; without npurun's file; in
    another job.
    """
    large, count = tf.Variable(tf.zeros([500_000])), tf.Variable(0)
    things = {"preemption": False, "per_rank": {"large": large}, "count": count}
    checkpoint = npu.train.JobCheckpoint(directory, every=1, **things)
    with warnings_of_package() as texts:
        checkpoint.step_done(np.int64(1), {"score": 0.5})
        with file_sizes(1_000_000 if npu.distribute.rank() == npu.distribute.size() - 1 else None):
            checkpoint.step_done(2)
            errors = [error_of(checkpoint.save, 2)]
        with file_sizes(3_000_000):
            errors.append(
                error_of(checkpoint.save, 2, {"long": "x" * 4_000_000})
            )  # fails when all else is written
        errors.append(error_of(checkpoint.save, 2, {"score": np.float32(0.5)}))
        there = sorted(os.listdir(directory))
        other = npu.train.JobCheckpoint(directory, **things)
        latest = other.restore()
        with settings(NPU_DEVICE_PROGRESS_FILE=f"{directory}/not/there"):
            checkpoint.step_done(3)
        errors.append(error_of(other.save, 4))
        name = Path(directory, "again", ".latest.json.part")
        again = npu.train.JobCheckpoint(name.parent, **things)
        npu.distribute.barrier()
        if npu.distribute.is_main():
            # Where a file is to be written.
            name.mkdir(parents=True)
        errors.append(error_of(again.save, 1))
        if npu.distribute.is_main():
            name.rmdir()
        again.save(1)
        saved_again = sorted(os.listdir(name.parent))
    return {
        "warnings": texts,
        "errors": errors,
        "there": there,
        "latest": latest,
        "end": sorted(os.listdir(directory)),
        "again": saved_again,
    }


def body_several_optimizers(directory: str) -> None:
    """Go on to the same bits with two models, each with its optimizer, and with three optimizers of one model, of which
    one has no step.
    """

    def train(place: str, models: int, end: int) -> list[np.ndarray]:
        tf.keras.utils.set_random_seed(1)
        layers = tf.keras.layers
        things: dict[str, Any] = {}
        for number in range(models):
            hidden = [tf.keras.Input([3]), layers.Dense(4), layers.Dense(2)]
            things[f"model{number}"] = tf.keras.Sequential(hidden)
        parts = [model.trainable_variables for model in things.values()]
        if models == 1:
            [variables] = parts
            # The second part first.
            parts = [variables[2:], variables[:2]]
        optimizers = [tf.keras.optimizers.Adam(0.1) for _ in range(3)]
        things.update({f"optimizer{number}": each for number, each in enumerate(optimizers)})
        checkpoint = npu.train.JobCheckpoint(place, preemption=False, **things)
        step = checkpoint.restore()
        while step < end:
            step += 1
            for optimizer, part in zip(optimizers, parts):
                gradients = [tf.sin(step + tf.convert_to_tensor(variable)) for variable in part]
                optimizer.apply_gradients(zip(gradients, part))
        checkpoint.save(step)
        return [np.array(variable) for part in parts for variable in part]

    for models in (1, 2):
        place = f"{directory}/{models}"
        train(place, models, 2)
        same_bits(train(place, models, 4), train(f"{place}/whole", models, 4))


def body_fewer_things(directory: str) -> Any:
    """Return what isn't kept of two variables by a script that has one, and what a second object says. It is asked to
    stop in a process with more open files than ``select`` takes.
    """
    both = {"one": tf.Variable(1.0), "other": tf.Variable(2.0)}
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    with warnings_of_package() as texts, contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        opened.enter_context(npu.train.JobCheckpoint(directory, **both)).save(1)
        checkpoint = opened.enter_context(npu.train.JobCheckpoint(directory, one=tf.Variable(0.0)))
        found = checkpoint.restore(), checkpoint.not_kept, texts
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit, match="75"):
            for step in range(2, 1000):
                checkpoint.step_done(step)
                time.sleep(0.01)
        return found


def body_two_ask() -> None:
    """Have two ask for the last step, one after the other. If the first never tells the step, nobody goes on whom the
    other still holds; if it has told, the other finds the same step.
    """
    ranks = current_world()
    assert ranks is not None
    health, everyone = ranks.job.health, range(ranks.size)

    def ask(watch: Any, name: str) -> int:
        return max(
            health.ask(preemption.STEP_QUESTION, [watch.name, name], everyone, 10.0).values()
        )

    def tell(watch: Any, name: str, step: int) -> None:
        health.ask(preemption.STOP_QUESTION, [watch.name, name, step], everyone, 10.0)

    for gives_up in (True, False):
        with contextlib.closing(preemption.Preemption(ranks)) as watch:
            ranks.wait()
            if ranks.is_main:
                first = ask(watch, "first")
                if gives_up:
                    second = ask(watch, "second")
                    tell(watch, "first", preemption._NEVER)
                    time.sleep(0.1)  # enough for the others to go on, if they did
                else:
                    tell(watch, "first", first)
                    second = ask(watch, "second")
                    assert second == first
                tell(watch, "second", second)
            deadline, step = time.monotonic() + 10.0, 1
            while not watch.count_step():
                step += 1
                assert time.monotonic() < deadline, f"step {step}"
            assert ranks.objects(step, "last step") == [step] * ranks.size


def body_in_a_thread(directory: str) -> str:
    """Stop as asked, though a thread has made a JobCheckpoint, too; return what it was told."""
    count = tf.Variable(0)
    with (
        settings(NPU_DEVICE_PREEMPT_SIGNAL="SIGUSR1"),
        npu.train.JobCheckpoint(f"{directory}/main", count=count) as checkpoint,
    ):
        checkpoint.restore()
        with warnings_of_package() as texts:
            thread = threading.Thread(target=npu.train.JobCheckpoint, args=(f"{directory}/side",))
            thread.start()
            thread.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit, match="75"):
            for step in range(1, 1000):
                time.sleep(0.01)
                checkpoint.step_done(step)
    [text] = texts
    return text


def body_many_batches(steps: int) -> tuple[list[str], int, str]:
    """Pass over the batches of some steps; return what is lost, the next sample, and what is printed."""
    data = tf.data.Dataset.range(steps + 2)
    expected = next_samples.look_ahead({"iterator": iter(data.skip(steps))})
    iterator = iter(data)
    world = current_world()
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        lost = next_samples.move_on(world, {"iterator": iterator}, steps, [expected] * 2)
    return lost, int(next(iterator)), output.getvalue()


def main() -> None:
    """Train up to a step; on the last rank what ends a job may happen.

    Arguments: a directory, the last step, and ``killed``: SIGKILL when the part of step 6 of that rank is there, before
    it has its name; or ``asked``: SIGTERM in step 7; or ``whole``: nothing, and a training from the first step beside.
    """
    directory, end, how = sys.argv[1:]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, (
        "importing must not install a handler"
    )
    training = Training(f"{directory}/checkpoints", every=3)
    rank = npu.distribute.rank()

    def kill() -> None:
        while not list(Path(directory).glob("checkpoints/.step-00000006-*/rank-*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == npu.distribute.size() - 1:
        training.signal_at = 7 if how == "asked" else 0
        if how == "killed":
            threading.Thread(target=kill, daemon=True).start()
    results = {"": training.run(int(end))}
    if how == "whole":
        results["whole"] = Training(f"{directory}/whole", preemption=False).run(int(end))
    for name, one in results.items():
        np.savez(f"{directory}/{name}{rank}.npz", *one["weights"], start=one["start"])


def main_slow() -> None:
    """Save after the first step, and take a minute for the second."""
    directory = sys.argv[1]
    count = tf.Variable(0)
    checkpoint = npu.train.JobCheckpoint(f"{directory}/checkpoints", every=1, count=count)
    checkpoint.restore()
    checkpoint.step_done(1)
    Path(directory, f"{npu.distribute.rank()}.ready").touch()
    # Python's handlers of signals don't run meanwhile.
    tf.numpy_function(lambda: time.sleep(60.0) or 0.0, [], tf.float64)
    checkpoint.step_done(2)


class SignalsAtTheEnd:
    """Sends SIGTERM to this process when the interpreter takes it apart."""

    def __del__(self, kill: Any = os.kill, pid: int = os.getpid()) -> None:
        kill(pid, 15)


def main_late() -> None:
    """Stop because rank 0 is sent the signal; both ranks get it again while they end."""
    sys.modules["late"] = SignalsAtTheEnd()  # type: ignore[assignment]
    rank = npu.distribute.rank()
    checkpoint = npu.train.JobCheckpoint(f"{sys.argv[1]}/checkpoints", count=tf.Variable(0))
    checkpoint.restore()
    closed_by_rank_0 = contextlib.nullcontext() if rank else checkpoint
    with closed_by_rank_0:
        for step in itertools.count(1):
            if step == 3 and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            npu.distribute.all_reduce(tf.ones(4))
            checkpoint.step_done(step)


if __name__ == "__main__":
    {"main": main, "main_slow": main_slow, "main_late": main_late}[sys.argv.pop(1)]()
