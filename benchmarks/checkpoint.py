"""``npurun -n 2 -m benchmarks.checkpoint``: what a checkpoint of the job and a replica audit of ResNet-50 cost."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any, Callable

import npu_device as npu

npu.open().as_default()

import tensorflow as tf  # noqa: E402

BATCH, PIXELS = 4, 96


def seconds(action: Callable[[], Any]) -> float:
    """Return how long an action took on this rank; all ranks begin together."""
    npu.distribute.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    """Print the medians of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="default 9")
    parser.add_argument("--directory", help="of the checkpoints; default a new one under /tmp")
    given = parser.parse_args()
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.applications.ResNet50(weights=None, input_shape=(PIXELS, PIXELS, 3), classes=10)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    images = tf.random.stateless_normal([BATCH, PIXELS, PIXELS, 3], [1, npu.distribute.rank()])
    labels = tf.zeros([BATCH], tf.int32)

    def make_step(audit: str) -> tuple[Any, Callable[[], Any]]:
        os.environ["NPU_DEVICE_AUDIT"] = audit
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(keras.optimizers.SGD(1e-4, momentum=0.9))
        optimizer.build(model.trainable_variables)

        @tf.function
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return optimizer, lambda: step().numpy()

    npu.distribute.broadcast(model.variables)
    optimizer, plain = make_step("off")
    _, audited = make_step("1")
    steps = {"step": plain, "step with an audit": audited}
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=given.directory) as mine:
        directory = npu.distribute.broadcast_object(mine)
        checkpoint = npu.train.JobCheckpoint(directory, preemption=False, model=model, optimizer=optimizer)
        checkpoint.restore()
        for action in (plain, plain, audited, audited):
            action()
        for repeat in range(1, given.repeats + 1):
            for name, action in steps.items():
                times.setdefault(name, []).append(seconds(action))
            times.setdefault("save", []).append(seconds(lambda at=repeat: checkpoint.save(at)))  # type: ignore[misc]
        for _ in range(given.repeats):
            times.setdefault("restore", []).append(seconds(checkpoint.restore))
        npu.distribute.barrier()
        written = sum(os.path.getsize(os.path.join(path, name)) for path, _, names in os.walk(mine) for name in names)
    times["audit"] = [audit - step for step, audit in zip(times["step"], times["step with an audit"])]
    if npu.distribute.is_main():
        print(f"{written / min(given.repeats, 3) / 1e6:.0f} MB a checkpoint")
        for name, measured in times.items():
            middle, least, most = statistics.median(measured), min(measured), max(measured)
            print(f"{name}: {1e3 * middle:.0f} ms ({1e3 * least:.0f} to {1e3 * most:.0f})")


if __name__ == "__main__":
    main()
