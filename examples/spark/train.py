"""Two Spark tasks that train one model: the distributor sets ``TF_CONFIG``, and ``npu.open()`` reads it.

Install Spark and run it on this machine:

    pip install pyspark spark-tensorflow-distributor    # and Java 17
    python examples/spark/train.py --workers 2
"""

import argparse
import os
import secrets
import sys

from pyspark.accumulators import AccumulatorParam
from pyspark.sql import SparkSession
from spark_tensorflow_distributor import MirroredStrategyRunner


class Joined(AccumulatorParam):
    """Lists that are added up by appending one to the other."""

    def zero(self, value):
        return []

    def addInPlace(self, one, other):
        return one + other


def train(secret, weights):
    """Train on one rank, in a process of its own; rank 0's result is that of the runner."""
    os.environ["NPU_DEVICE_SECRET"] = (
        secret  # the tasks meet at an address that others can reach, too
    )

    import npu_device as npu

    npu.open()

    import numpy as np
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(
        1 + npu.distribute.rank()
    )  # replicate() starts all ranks with rank 0's weights
    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model = npu.distribute.replicate(model)

    x = np.random.default_rng(0).random([240, 8], np.float32)
    history = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=24, epochs=3, verbose=2)

    trained = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    weights.add([(npu.distribute.rank(), trained.tobytes())])
    npu.close()  # Spark ends its processes without Python's own exit, in which npu_device would leave the job
    return history.history["loss"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--master", help="default: this machine, with one core for each worker")
    args = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would take the python3 of PATH
    session = (
        SparkSession.builder.master(args.master or f"local[{args.workers}]")
        .config("spark.python.worker.reuse", "false")  # a process can join one job only
        .getOrCreate()
    )
    weights = session.sparkContext.accumulator([], Joined())
    # With use_custom_strategy the runner sets TF_CONFIG, and makes no strategy of TensorFlow's.
    runner = MirroredStrategyRunner(num_slots=args.workers, use_gpu=False, use_custom_strategy=True)
    losses = runner.run(train, secret=secrets.token_hex(32), weights=weights)
    ranks = sorted(rank for rank, _ in weights.value)
    equal = ranks == list(range(args.workers)) and len({one for _, one in weights.value}) == 1
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; ranks {ranks}; equal weights: {equal}")
    session.stop()


if __name__ == "__main__":
    main()
