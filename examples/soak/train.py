"""A training that resumes after any end, for ``python -m npu_device.testing.soak``: a small one, or ResNet-50.

    python -m npu_device.testing.soak --mtbf 30 --for 900 --result {dir}/weights.npy -- \\
        -n 2 examples/soak/train.py --directory {dir} --model resnet50 --image 32 --steps 1000 --every 10
"""

import argparse
import os
import zlib

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

keras = tf.keras


def make_model(name, image):
    if name == "resnet50":
        return keras.applications.ResNet50(weights=None, input_shape=(image, image, 3), classes=10)
    return keras.Sequential(
        [
            keras.Input([image, image, 3]),
            keras.layers.AveragePooling2D(8),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def report_costs(path, memory_every):
    """Print how many steps the failures have cost, given the file of rank 0."""
    costs = []
    last = 0
    with open(path) as log:
        for line in log:
            words = line.split()
            if words[0] == "resumed" and last:
                costs.append(last - int(words[1]))
            last = int(words[-1])
    within = sum(cost <= memory_every for cost in costs)
    print(
        f"of {len(costs)} restarts, {within} cost at most {memory_every} steps, and {len(costs) - within} more, as a "
        f"copy was being written; the most: {max(costs, default=0)}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    parser.add_argument("--model", choices=["small", "resnet50"], default="small")
    parser.add_argument(
        "--image", type=int, default=96, help="width and height of the images in pixels"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--memory_every", type=int, help="steps between copies in memory")
    given = parser.parse_args()
    keras.utils.set_random_seed(1)
    model = make_model(given.model, given.image)
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(
        keras.optimizers.SGD(0.01, momentum=0.9)
    )
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    images, labels = (
        random.random([256, given.image, given.image, 3], np.float32),
        random.integers(0, 10, 256),
    )
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, 12)
    iterator = iter(dataset.shuffle(64, seed=3).repeat().batch(batch))
    npu.distribute.broadcast(model.weights)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )

    with npu.train.JobCheckpoint(
        os.path.join(given.directory, "checkpoints"),
        every=given.every,
        memory_every=given.memory_every,
        model=model,
        optimizer=optimizer,
        per_rank={"iterator": iterator},
    ) as checkpoint:
        resumed = checkpoint.restore()
        # Each step with a checksum of its batch: how many steps a failure has cost, and what was read.
        steps = os.path.join(given.directory, f"steps{npu.distribute.rank()}")
        with open(steps, "a") as log:
            print("resumed", resumed, file=log, flush=True)
            for done in range(resumed, given.steps):
                x, y = next(iterator)
                step(x, y)
                print(zlib.crc32(x.numpy()), done + 1, file=log, flush=True)
                checkpoint.step_done(done + 1)
    if npu.distribute.is_main():
        if given.memory_every:
            report_costs(steps, given.memory_every)
        path = os.path.join(given.directory, "weights.npy")
        with open(path + ".part", "wb") as file:
            np.save(file, np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
        os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
