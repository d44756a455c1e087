"""``npurun -n 2 -m benchmarks.replicated``: a step of ``fit`` with a replicated ResNet-50, and one with a wrapped
optimizer only.

Rounds of the two alternate. Both train on the same samples: the wrapped optimizer gets each rank's part, the replicated
model all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import npu_device as npu

npu.open().as_default()

import tensorflow as tf  # noqa: E402

keras: Any = tf.keras

BATCH, PIXELS = 4, 96  # of a rank


class Clock(keras.callbacks.Callback):
    """Measures the steps of a ``fit``, from the end of one to the end of the next; the first one has no beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def trained(replicated: bool, steps: int) -> Any:
    """Return a function that trains a model of its own for some steps, and returns the median step in seconds."""
    keras.utils.set_random_seed(1)
    model = keras.applications.ResNet50(weights=None, input_shape=(PIXELS, PIXELS, 3), classes=10)
    rank, size = npu.distribute.rank(), npu.distribute.size()
    images = tf.random.stateless_normal([BATCH * size, PIXELS, PIXELS, 3], [1, 2])
    labels = tf.range(BATCH * size) % 10
    mine = slice(None) if replicated else slice(rank * BATCH, rank * BATCH + BATCH)
    dataset = tf.data.Dataset.from_tensors((images[mine], labels[mine])).repeat()
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    if not replicated:
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    if replicated:
        model = npu.distribute.replicate(model)

    def run() -> float:
        clock = Clock()
        npu.distribute.barrier()
        model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return statistics.median(clock.seconds)

    return run


def main() -> None:
    """Print rank 0's medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each kind; default 20")
    parser.add_argument("--steps", type=int, default=9, help="of each round; default 9")
    given = parser.parse_args()
    kinds = {"wrapped": trained(False, given.steps), "replicated": trained(True, given.steps)}
    for run in kinds.values():
        run()  # traces the step
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(given.rounds):
        for kind in sorted(kinds, reverse=bool(number % 2)):
            found[kind].append(kinds[kind]())
    ratios = [new / old for old, new in zip(found["wrapped"], found["replicated"])]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    if npu.distribute.is_main():
        for kind, seconds in found.items():
            print(f"{kind}: {1000 * statistics.median(seconds):.1f} ms, fastest round {1000 * min(seconds):.1f} ms")
        mean = statistics.mean(ratios)
        print(f"replicated / wrapped: {mean:.4f}, standard error {error:.4f} ({len(ratios)} pairs of rounds)")


if __name__ == "__main__":
    main()
