"""Memory of the data that ranks train on, by the way they read them: ``python -m benchmarks.data_memory``.

Prints a Markdown table: by how many MiB the memory of all ranks together has grown at the end of the second epoch of
``fit``, with a replicated model. One rank is a process without a job.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_device import testing

_BATCH = 256


def _load(directory: str) -> list[np.ndarray]:
    return [np.load(f"{directory}/{name}.npy") for name in "xy"]


def _own(directory: str, columns: int) -> dict[str, Any]:
    x, y = _load(directory)
    return {"x": x, "y": y, "batch_size": _BATCH}


def _loaded_once(directory: str, columns: int) -> dict[str, Any]:
    import npu_device as npu

    x, y = npu.distribute.load_once(_load, directory)
    return {"x": x, "y": y, "batch_size": _BATCH}


def _mapped(directory: str, columns: int) -> dict[str, Any]:
    x, y = (np.load(f"{directory}/{name}.npy", mmap_mode="r") for name in "xy")
    return {"x": x, "y": y, "batch_size": _BATCH}


def _cached_before(directory: str, columns: int) -> dict[str, Any]:
    import npu_device as npu

    records, decode = _records(directory, columns)
    return {"x": npu.distribute.pipeline(records.cache(), decode, _BATCH)}


def _cached_after(directory: str, columns: int) -> dict[str, Any]:
    import npu_device as npu

    records, decode = _records(directory, columns)
    return {"x": npu.distribute.pipeline(records, decode, _BATCH).cache()}


def _records(directory: str, columns: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return a dataset of the rows as bytes, and what makes a sample of one."""
    import tensorflow as tf

    def decode(record: Any) -> Any:
        numbers = tf.io.decode_raw(record, tf.float32)
        return tf.ensure_shape(numbers, [columns]), numbers[0]

    return tf.data.FixedLengthRecordDataset(f"{directory}/rows", columns * 4), decode


WAYS = {
    "arrays of each rank": _own,
    "`load_once`": _loaded_once,
    '`np.load(mmap_mode="r")`': _mapped,
    "`cache()` before `pipeline`": _cached_before,
    "`cache()` after `pipeline`": _cached_after,
}


def growth(way: str, directory: str, columns: int) -> float:
    """Return by how many MiB this rank has grown at the end of a ``fit``."""
    import tensorflow as tf

    import npu_device as npu

    keras = tf.keras
    model = keras.Sequential([keras.layers.Input((columns,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    npu.distribute.replicate(model)
    # What TensorFlow allocates once, at the first data of a kind, doesn't count.
    model.fit(**WAYS[way](f"{directory}/small", columns), verbose=0)
    grown = []

    class Look(keras.callbacks.Callback):  # type: ignore[name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                # Pages that several ranks map count in parts, so that all have to be there.
                npu.distribute.barrier()
                grown.append(_pss() - before)
                npu.distribute.barrier()

    npu.distribute.barrier()
    before = _pss()
    npu.distribute.barrier()
    arguments = WAYS[way](directory, columns)
    model.fit(**arguments, epochs=2, verbose=0, callbacks=[Look()])
    return float(grown[0])


def _pss() -> float:
    """Return the memory of this process in MiB; what several processes map counts in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


def _write(directory: str, count: int, columns: int) -> None:
    Path(directory).mkdir(exist_ok=True)
    rows = np.ones([count, columns], np.float32)
    np.save(f"{directory}/x.npy", rows)
    np.save(f"{directory}/y.npy", rows[:, 0])
    rows.tofile(f"{directory}/rows")


def _table(mebibytes: int, columns: int, keras: int, sizes: Sequence[int]) -> None:
    # The ranks import the function, which they can't from a module that is run.
    importable = importlib.import_module("benchmarks.data_memory")
    print("| MiB | " + " | ".join(f"ranks: {size}" for size in sizes) + " |")
    print("|---" + "|--:" * len(sizes) + "|")
    with tempfile.TemporaryDirectory() as directory:
        _write(directory, (mebibytes << 20) // (columns * 4), columns)
        _write(f"{directory}/small", 2 * _BATCH, columns)
        for way in WAYS:
            cells = [way]
            for size in sizes:
                grown = testing.run(
                    importable.growth, way, directory, columns, ranks=size, keras=keras, fresh=True
                )
                cells.append(f"{sum(grown):,.0f}")
            print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the data")
    parser.add_argument("--columns", type=int, default=2048, help="float32 numbers in a row")
    parser.add_argument("--keras", type=int, default=3, choices=[2, 3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    _table(options.mib, options.columns, options.keras, options.ranks)


if __name__ == "__main__":
    main()
