"""What layers hold outside variables: vocabularies work as on one process, and must be the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compared import same
from heard import error_of
from pool import Pool

import npu_device as npu

WORDS = np.array([["a b"], ["b c"], ["c"], ["a"], ["b"], ["d a"]])
NUMBERS = np.array([[1], [2], [3], [1], [2], [9]])


def make_layer(kind: str, words: Any = WORDS, numbers: Any = NUMBERS, **more: Any) -> Any:
    """Return a layer that has adapted to its data."""
    layers = tf.keras.layers
    name, _, how = kind.partition(", ")
    mode = {} if name == "Normalization" else {"output_mode": "multi_hot"}
    data = {"Normalization": numbers.astype("f4"), "Discretization": numbers.astype("f4")}
    data.update(IntegerLookup=numbers)
    if how == "tf_idf":
        mode = {"output_mode": "tf_idf"}
    size = {"num_bins": 3} if name == "Discretization" else {}
    layer = getattr(layers, name)(**mode, **size, **more)
    layer.adapt(data.get(name, words))
    return layer


KINDS = (
    "StringLookup, adapted",
    "IntegerLookup, adapted",
    "TextVectorization, tf_idf",
    "Normalization, adapted",
    "Discretization, adapted",
)


def _model(layer: Any, dtype: str) -> Any:
    keras = tf.keras
    inputs = keras.Input((1,), dtype=dtype)
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def body_preprocessing() -> Any:
    """Fit and predict with a layer of each kind, each with an output of its own; return the numbers."""
    keras = tf.keras
    data = {"string": WORDS, "int64": NUMBERS, "float32": NUMBERS.astype("f4")}
    inputs = {dtype: keras.Input((1,), dtype=dtype, name=dtype) for dtype in data}
    outputs = []
    for place, kind in enumerate(KINDS):
        name = kind.partition(",")[0]
        dtype = "float32" if name in ("Normalization", "Discretization") else "int64"
        dtype = "string" if name in ("StringLookup", "TextVectorization") else dtype
        dense = keras.layers.Dense(1, kernel_initializer="ones", name=f"kind{place}")
        outputs.append(dense(make_layer(kind)(inputs[dtype])))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), ["mse"] * len(KINDS))
    npu.distribute.broadcast(model.variables)  # with vocabularies among them, in tf-keras
    model = npu.distribute.replicate(model)
    x = {dtype: tf.constant(values) for dtype, values in data.items()}
    dataset = tf.data.Dataset.from_tensor_slices((x, (tf.reshape(tf.range(6.0), (6, 1)),) * len(KINDS))).batch(4)
    losses = model.fit(dataset, verbose=0).history
    predicted = model.predict(dataset.map(lambda x, y: x), verbose=0)
    weights = [model.get_layer(f"kind{place}").get_weights() for place in range(len(KINDS))]
    return {
        "losses": {name: float(loss) for name, [loss] in losses.items()},
        **{kind: (out.tolist(), [each.tolist() for each in own]) for kind, out, own in zip(KINDS, predicted, weights)},
    }


def body_different(kind: str, how: str) -> str:
    """Adapt to this rank's part of the data, and return the error of ``fit`` or ``broadcast``."""
    rank = npu.distribute.rank()
    if kind == "table":
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([0.0, float(rank)])), -1.0
        )

        class Own(tf.keras.layers.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(name="own_table")
                self.table = table

            def call(self, x: Any) -> Any:
                return tf.reshape(self.table.lookup(x), (-1, 1))

            def compute_output_shape(self, shape: Any) -> Any:
                return (shape[0], 1)

        layer: Any = Own()
        data: Any = WORDS
    elif kind == "constant":

        class Projection(tf.keras.layers.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(name="projection")
                self.matrix = np.full((1, 2), rank, "f4")

            def call(self, x: Any) -> Any:
                return x @ self.matrix

        layer, data = Projection(), NUMBERS.astype("f4")
    else:
        layer = make_layer(kind, WORDS[rank::2], NUMBERS[rank::2] * (1 + rank), name="adapted")
        data = WORDS if "String" in kind else NUMBERS.astype("f4")
    model = _model(layer, "string" if data.dtype.kind == "U" else "float32")
    if how == "broadcast":
        return error_of(npu.distribute.broadcast, model.variables)
    dataset = tf.data.Dataset.from_tensor_slices((tf.constant(data), tf.ones((6, 1)))).batch(6)
    return error_of(npu.distribute.replicate(model).fit, dataset, verbose=0)


def body_strategy(kind: str) -> str:
    """Train a model made in the scope of a strategy of ``tf.distribute`` with one device."""
    devices: Any = ["CPU:0"] if kind == "MirroredStrategy" else "CPU:0"
    with getattr(tf.distribute, kind)(devices).scope():
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)], name="of_a_scope")
        model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "f4"), np.ones((8, 1), "f4")
    return error_of(lambda: npu.distribute.replicate(model).fit(x, y, batch_size=4, verbose=0)) or "trained"


@pytest.mark.slow
def test_preprocessing_inside_a_model(several_keras_ranks: Pool, keras_single: Pool) -> None:
    [alone] = keras_single.run(body_preprocessing)
    for rank in several_keras_ranks.run(body_preprocessing):
        same(rank, alone)


@pytest.mark.parametrize(
    ("kind", "how", "name", "attribute"),
    [
        ("StringLookup, adapted", "fit", "adapted", "vocabulary"),
        ("Normalization, adapted", "fit", "adapted", "mean"),
        ("Discretization, adapted", "fit", "adapted", "bin_boundaries"),
        ("table", "fit", "own_table", "table"),
        ("constant", "fit", "projection", "matrix"),
        pytest.param("StringLookup, adapted", "broadcast", "adapted", "vocabulary", marks=pytest.mark.only_keras("2")),
    ],
)
def test_a_difference_names_the_layer(
    several_keras_ranks: Pool, kind: str, how: str, name: str, attribute: str
) -> None:
    parts = f"layer {name!r}", f"{attribute!r}", "rank 0 on host", "rank 1 on host", "before they are divided"
    for text in several_keras_ranks.run(body_different, kind, how):
        for part in parts:
            assert part in text


@pytest.mark.parametrize("kind", ["MirroredStrategy", "OneDeviceStrategy"])
def test_a_model_of_a_strategy(several_keras_ranks: Pool, kind: str) -> None:
    for text in several_keras_ranks.run(body_strategy, kind):
        if kind == "OneDeviceStrategy":
            assert text == "trained"
        else:
            assert "'of_a_scope' was made under MirroredStrategy" in text and "outside strategy.scope()" in text
