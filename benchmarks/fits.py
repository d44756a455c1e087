"""Many fits of new models in one process: ``python -m benchmarks.fits --fits 50``.

Prints a row of a Markdown table per Keras and number of ranks: what each fit leaves in memory, and in threads, models
and groups. One rank is a process without a job.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from npu_device import testing

_WARM = 10  # first fits, in which TensorFlow makes what it keeps once
_HEADER = (
    "| Keras | ranks | MB per fit | objects per fit | threads | models | groups |\n"
    + 7 * "|---"
    + "|"
)


def left_by_fits(count: int) -> list[float]:
    """Fit new models; return what each leaves after the first ones: memory, objects, threads, models, groups."""
    import tensorflow as tf

    import npu_device as npu
    from npu_device._src.collectives import job

    keras = tf.keras
    x = np.random.default_rng(1).normal(size=[256, 32]).astype(np.float32)
    models: list[Any] = []

    def held() -> list[int]:
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("Private_Dirty:")]
        current = job.current()
        groups = 0
        if current is not None:
            groups = len(current.groups)
        alive = sum(model() is not None for model in models)
        return [
            int(line.split()[1]) << 10,
            len(gc.get_objects()),
            len(os.listdir("/proc/self/task")),
            alive,
            groups,
        ]

    before: list[int] = []
    for number in range(_WARM + count):
        if number == _WARM:
            before = held()
        model = keras.Sequential(
            [keras.layers.Input((32,)), keras.layers.Dense(16), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        npu.distribute.replicate(model)
        model.fit(x, x[:, :1], batch_size=64, verbose=0)
        models.append(weakref.ref(model))
        del model
    after = held()
    memory, objects, *rest = (later - earlier for earlier, later in zip(before, after))
    return [memory / 1e6 / count, objects / count, *rest]


def main() -> None:
    """Measure, and print the table."""
    # The ranks import the function, which they can't from a module that is run.
    importable = importlib.import_module("benchmarks.fits")

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=50, help="fits that are measured")
    count = parser.parse_args().fits
    print(_HEADER)
    for keras in (3, 2):
        for ranks in (1, 2):
            [found, *_] = testing.run(
                importable.left_by_fits, count, ranks=ranks, keras=keras, fresh=True, limit=3600
            )
            cells: list[Any] = [
                keras,
                ranks,
                f"{found[0]:.2f}",
                *(f"{one:.0f}" for one in found[1:]),
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
