"""``npurun verify`` of scripts that train in several phases: which it compares, and what it says of the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_verify import verified

START = """
import time
import numpy as np, tensorflow as tf, npu_device as npu
npu.open(seed=1).as_default()
rank, size = npu.distribute.rank(), npu.distribute.size()
x = np.random.default_rng(0).normal(size=[48, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)
def new_model():
    return tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(3), tf.keras.layers.Dense(1)])
"""

FITS = (
    START
    + """
model = npu.distribute.replicate(new_model())
model.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly={eager})
rate = [tf.keras.callbacks.ReduceLROnPlateau("loss"), tf.keras.callbacks.LambdaCallback()]
model.fit(x, y, batch_size=12, epochs=900, validation_data=(x, y), callbacks=rate, verbose=0)
model.evaluate(x, y, verbose=0)
model.layers[0].trainable = False
model.compile(tf.keras.optimizers.SGD(0.01), "mse")
model.fit(x, y, batch_size=12, verbose=0)
model.fit(x[:24], y[:24], batch_size=12, epochs=900, verbose=0)
model.save("half.keras")
npu.distribute.barrier()
model = tf.keras.models.load_model("half.keras")
{then}
model.predict(x, verbose=0)
"""
)
LOADED = {
    "not reduced": "model.fit(x[rank::size], y[rank::size], batch_size=12 // size, verbose=0)",
    "": "model = npu.distribute.replicate(model)\nmodel.fit(x, y, batch_size=12, verbose=0)",
}


@pytest.mark.parametrize("cause", ["not reduced", pytest.param("", marks=pytest.mark.full)])
def test_causes_in_one_of_several_fits(cause: str, tmp_path: Path) -> None:
    verdict = verified(
        tmp_path, FITS.format(then=LOADED[cause], eager=bool(cause)), cause, 3 if cause else 2
    )
    lines = (tmp_path / "script.py").read_text().splitlines()
    fits = [f"script.py:{number}" for number, text in enumerate(lines, start=1) if ".fit(" in text]
    assert [line.split()[-1] for line in verdict.table] == [fit for fit in fits for _ in range(2)]
    compared = [
        f"2 steps of {kind}, {fit}" for kind, fit in zip(["Adam", "SGD", "SGD", "SGD"], fits)
    ]
    assert (f"in SGD, {fits[-1]}: " if cause else ", ".join(compared)) in verdict.text
    evaluations, between_epochs = verdict.missed
    calls = {
        "the validation in fit": "validation_data",
        "evaluate": ".evaluate(",
        "predict": ".predict(",
    }
    for name, text in calls.items():
        [line] = [number for number, code in enumerate(lines, start=1) if text in code]
        assert re.search(rf"{name}, \S*script.py:{line} ", evaluations), evaluations
    assert evaluations.count("script.py") == 3
    assert re.match(
        rf"ReduceLROnPlateau between epochs: the fit in \S*{fits[0]} ", between_epochs
    ), between_epochs


FULL = pytest.mark.full
LOOPS = (
    START
    + """
both = [new_model(), new_model()]
often, seldom, later = (tf.keras.optimizers.SGD(0.1) for _ in range(3))
def step(x, y, model, optimizer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = npu.distribute.all_reduce(tape.gradient(loss, model.trainable_variables))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

def train(pairs, steps):
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.from_tensor_slices((x, y)).repeat(), 12)
    for number, parts in enumerate(dataset.batch(batch).take(steps)):
        for model, optimizer, every in pairs:
            if number % every == 0:
                step(*parts, model, optimizer)

npu.distribute.broadcast(both[0].variables + both[1].variables)
train([(both[0], often, 1), (both[1], seldom, 9)], 10)
train([(both[0], often, 1)], 9)
train([(both[0], later, 1)], {most})
both[0].compile("sgd", "mse")
both[0].fit(x, y, epochs=900)
raise KeyError("an error of the script")
"""
)


@pytest.mark.parametrize(
    ("seconds", "most", "says"),
    [
        (
            3.0,
            10**9,
            [
                "what follows 3 s after the first step",
                "calls that train or evaluate in script.py:31",
            ],
        ),
        pytest.param(
            30.0,
            20,
            ["what follows an error: as one process, the script failed", "KeyError"],
            marks=FULL,
        ),
    ],
)
def test_a_loop_that_takes_too_long_is_ended(
    seconds: float, most: int, says: list[str], tmp_path: Path
) -> None:
    """A loop can't be cut short: one without an end is ended."""
    source = LOOPS.format(most=most).replace("both[0].fit" if most < 99 else "no fit", "# ")
    verdict = verified(tmp_path, source, "", 4, seconds=seconds)
    phases = re.findall(r"(\d) steps of SGD, script.py:17 from script.py:(\d+)", verdict.text)
    assert (
        phases == [("4", "27"), ("2", "28"), ("2", "29")][: len(phases)]
    )  # a busy machine reaches fewer
    assert len(verdict.table) == sum(int(steps) for steps, _ in phases) > 3
    assert all(text in " ".join(verdict.missed) for text in says), verdict.missed
