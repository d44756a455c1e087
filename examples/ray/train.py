"""Two Ray workers that train one model: Ray's ``TensorflowTrainer`` sets ``TF_CONFIG``, and ``npu.open()`` reads it.

Install Ray and run it on this machine:

    pip install "ray[train]"
    python examples/ray/train.py --workers 2
"""

import argparse
import os
import secrets
import tempfile


def train(config):
    """Train on one rank, in a process of its own; rank 0's result is that of ``TensorflowTrainer.fit``."""
    os.environ["NPU_DEVICE_SECRET"] = config[
        "secret"
    ]  # Ray's workers meet at an address that others can reach, too

    import npu_device as npu

    npu.open()

    import numpy as np
    import ray
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

    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    ray.get(config["weights"].put.remote(npu.distribute.rank(), weights))
    npu.close()  # ends this worker's part before Ray ends its process
    return history.history["loss"]


class Weights:
    """An actor of Ray that keeps the weights of each rank for the driver."""

    def __init__(self):
        self.by_rank = {}

    def put(self, rank, weights):
        self.by_rank[rank] = weights

    def get(self):
        return self.by_rank


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    ray.init(
        num_cpus=args.workers + 1
    )  # on this machine; without num_cpus, the cluster that `ray start` made
    weights = ray.remote(num_cpus=0)(Weights).remote()
    with tempfile.TemporaryDirectory() as directory:
        trainer = TensorflowTrainer(
            train,
            train_loop_config={"secret": secrets.token_hex(32), "weights": weights},
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=directory),
        )
        losses = trainer.fit().return_value
    by_rank = ray.get(weights.get.remote())
    equal = (
        sorted(by_rank) == list(range(args.workers))
        and len({one.tobytes() for one in by_rank.values()}) == 1
    )
    print(
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}; ranks {sorted(by_rank)}; equal weights: {equal}"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
