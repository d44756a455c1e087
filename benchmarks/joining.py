"""Where the time goes when a node joins a job: ResNet-50 on images of 32 pixels grows from 1 to 2 ranks on this host.

    python -m benchmarks.joining        some 2 minutes on 2 cores; nothing else may run meanwhile

Prints when each part was over, in seconds after the second npurun was started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 1_000_000  # the job is ended by hand
MEASURED = 5  # steps after the change


def train(directory: Path) -> None:
    """Train as a rank, and write down when each part is over."""
    attempt = os.environ["NPU_DEVICE_RESTART_COUNT"]
    path = directory / f"{attempt}.{os.environ['RANK_ID']}"

    def note(part: str) -> None:
        with path.open("a") as file:
            print(time.time(), part, file=file, flush=True)

    note("Python has started")
    import npu_device as npu

    npu.open().as_default()
    import numpy as np
    import tensorflow as tf

    keras = tf.keras
    note("TensorFlow is imported, the ranks have met")
    keras.utils.set_random_seed(1)
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    model = npu.distribute.replicate(model)
    model.compile(keras.optimizers.SGD(0.01, 0.9), "sparse_categorical_crossentropy")
    random = np.random.default_rng(0)
    images = random.random([1200, 32, 32, 3], np.float32)
    labels = random.integers(0, 10, 1200)

    class Times(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs: object = None) -> None:
            note("the model is made")

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if logs:
                note("step")

    checkpoint = npu.train.FitCheckpoint(directory / "checkpoints", each_epoch=False)
    callbacks = [Times(), checkpoint]
    try:
        model.fit(images, labels, batch_size=12, epochs=STEPS, verbose=0, callbacks=callbacks)
    except SystemExit:
        note("the state is saved")
        raise


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        first = launch(0, directory)
        wait_for(directory, "0.0", "step", MEASURED)
        began = time.time()
        second = launch(1, directory)
        wait_for(directory, "1.1", "step", MEASURED)
        for process in (first, second):
            process.terminate()
        outputs = [process.communicate()[1].decode() for process in (first, second)]
        stamps = read(directory, "0.0")
        last_step = max(moment for moment, part in stamps if part == "step")
        for moment, part in stamps:
            if moment >= last_step:
                print(f"{moment - began:6.1f} s  rank 0 of 1: {part}")
        for rank in ("1.0", "1.1"):
            stamps = read(directory, rank)
            # Steps that are passed over have no logs, but for the last of them, when the state is restored.
            restored, first_step = [moment for moment, part in stamps if part == "step"][:2]
            shown = [stamp for stamp in stamps if stamp[0] < restored]
            shown += [(restored, "the state is restored"), (first_step, "step")]
            for moment, part in shown:
                print(f"{moment - began:6.1f} s  rank {rank[-1]} of 2: {part}")
        print(f"{first_step - last_step:6.1f} s  without steps")
        print(next(line for line in outputs[0].splitlines() if "the job grows" in line))


def launch(node: int, directory: Path) -> subprocess.Popen[bytes]:
    npurun = [sys.executable, "-m", "npu_device.launch", "-n", "1", "--nnodes", "1:2"]
    meeting = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--rejoin-timeout", "2"]
    variables = {
        **os.environ,
        "NPU_DEVICE_SECRET": "benchmark",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*npurun, *meeting, __file__, str(directory)],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def read(directory: Path, rank: str) -> list[tuple[float, str]]:
    path = directory / rank
    if not path.exists():
        return []
    lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
    return [(float(moment), part) for moment, part in lines]


def wait_for(directory: Path, rank: str, part: str, count: int) -> None:
    while sum(name == part for _, name in read(directory, rank)) < count:
        time.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        main()
