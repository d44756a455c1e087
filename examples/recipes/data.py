"""Data for a replicated model: whole on every rank, or read in parts."""

import npu_device as npu

npu.open(seed=1)

import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras
BATCH = 64  # of all ranks together


def make_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return npu.distribute.replicate(model)


def main():
    digits = load_digits()
    x, y = digits.data.astype("float32") / 16, digits.target
    results = {}

    # Arrays: as on one process.
    model = make_model()
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        class_weight={0: 2.0} | dict.fromkeys(range(1, 10), 1.0),
        verbose=0,
    )
    results["arrays"] = model.evaluate(x, y, verbose=0)

    # A tf.data pipeline: every rank reads all of it, and takes its share of each batch.
    model = make_model()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(BATCH)
    model.fit(dataset, epochs=2, verbose=0)
    results["dataset"] = model.evaluate(x, y, verbose=0)

    # Parts: where reading is the work, each rank reads its own. They need not be of the same length.
    model = make_model()
    rank, size = npu.distribute.rank(), npu.distribute.size()
    part = tf.data.Dataset.from_tensor_slices((x, y)).shard(size, rank).batch(BATCH // size)
    model.fit(npu.distribute.divided(part), epochs=2, verbose=0)
    results["divided"] = model.evaluate(x, y, verbose=0)

    # One copy per host: one rank loads and prepares, and all ranks of its host map the arrays.
    shared_x, shared_y = npu.distribute.load_once(lambda: (x.copy(), y.copy()))
    model = make_model()
    model.fit(shared_x, shared_y, batch_size=BATCH, epochs=2, verbose=0)
    results["load_once"] = model.evaluate(shared_x, shared_y, verbose=0)

    predicted = model.predict(x[:101], verbose=0)  # of all samples, in order, on every rank
    if npu.distribute.is_main():
        print(
            {kind: [round(float(value), 3) for value in scores] for kind, scores in results.items()}
        )
    return {"results": results, "predicted": predicted, "weights": model.get_weights()}


if __name__ == "__main__":
    result = main()
