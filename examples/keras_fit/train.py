"""The README's line on real digits: Keras's ``fit`` with early stopping, a plateau schedule, the best checkpoint, and
resuming after an interruption.

    python examples/keras_fit/train.py                 one process
    npurun -n 2 examples/keras_fit/train.py            two ranks: the same weights, metrics and decisions
"""

import argparse
from pathlib import Path

import npu_device as npu

npu.open(seed=1)

import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras


def make_model():
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("build/keras_fit"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--stop_after", type=int, help="end after so many epochs, as if interrupted"
    )
    args = parser.parse_args()

    keras.utils.set_random_seed(1)
    digits = load_digits()
    images, labels = digits.images[..., None].astype("float32") / 16, digits.target

    model = make_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = npu.distribute.replicate(model)  # the one line

    args.directory.mkdir(parents=True, exist_ok=True)
    best = args.directory / "best.keras"
    history = model.fit(
        images,
        labels,
        batch_size=64,  # of all ranks together
        epochs=args.stop_after or args.epochs,
        validation_split=0.2,
        verbose=2,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", factor=0.3, patience=1, min_delta=0.01
            ),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=4),
            keras.callbacks.ModelCheckpoint(str(best), monitor="val_loss", save_best_only=True),
            keras.callbacks.BackupAndRestore(
                str(args.directory / "backup"),
                **({"delete_checkpoint": False} if args.stop_after else {}),
            ),
        ],
    )
    model = npu.distribute.replicate(keras.models.load_model(best))
    loss, accuracy = model.evaluate(images, labels, verbose=0)
    if npu.distribute.is_main():
        print(f"epochs {history.epoch} best: loss {loss:.4f} accuracy {accuracy:.4f}")
    return {
        "epochs": history.epoch,
        "loss": loss,
        "accuracy": accuracy,
        "weights": model.get_weights(),
    }


if __name__ == "__main__":
    result = main()
