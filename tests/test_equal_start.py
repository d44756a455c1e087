"""The first step: ranks that begin with different variables get rank 0's, and are told. What layers hold outside
variables must be the same on all ranks; vocabularies work as on one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, hears, settings
from fit_models import descend, outcome
from pool import Pool
from rank_comparison import compare, same_bits

import npu_device as npu
import npu_device.horovod.tensorflow as hvd


@hears
def body_first_step(
    said: list[str],
    mode: str,
    graph: bool,
    by_hand: bool = False,
    built: tuple[int, ...] = (0, 1, 2),
) -> Any:
    """Return the error of two steps, the values after them, and the warnings. Ranks not ``built`` are built then."""
    keras = tf.keras
    keras.utils.set_random_seed(npu.distribute.rank())
    model = keras.Sequential([keras.layers.Dense(600, name="wide"), keras.layers.Dense(1)])
    if npu.distribute.rank() in built:
        model.build([None, 600])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    reduced = npu.distribute.all_reduce if by_hand else list
    if not by_hand:
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)

    def step() -> None:
        descend(model, lambda: tf.reduce_sum(model(tf.ones([2, 600]))), optimizer, reduced)

    call = tf.function(step) if graph else step
    with settings(NPU_DEVICE_UNEQUAL_START=mode):
        error = error_of(lambda: [call(), call()])
    return error, [] if error else model.get_weights(), said


@pytest.mark.parametrize("built", [(0, 1, 2), ()], ids=["built", "built in the step"])
@pytest.mark.parametrize(
    "graph, by_hand", [(False, False), (True, True)], ids=["eager", "function reduced by hand"]
)
def test_they_become_rank_0s_with_a_warning(
    keras_ranks: Pool, size: int, graph: bool, by_hand: bool, built: tuple[int, ...]
) -> None:
    results = keras_ranks.run(body_first_step, "repair", graph, by_hand, built)
    same_bits(*(weights for _, weights, _ in results))
    assert len(results[0][2]) == (1 if size > 1 else 0)
    for text in results[0][2]:
        for part in (
            "wide",
            f"rank {size - 1} on host",
            "npu.distribute.broadcast(model.variables)",
        ):
            assert part in text
    assert not any(quiet for _, _, quiet in results[1:])


def test_an_error_on_request_in_an_eager_loop(keras_two_ranks: Pool) -> None:
    # The rank that compares last raises it, and ends the others.
    errors = [text for text, _, _ in keras_two_ranks.run(body_first_step, "error", False, True)]
    assert any("the ranks begin training with different values of 2 of " in text for text in errors)


def test_an_error_or_nothing_on_request(keras_two_ranks: Pool) -> None:
    for rank, (text, _, _) in enumerate(keras_two_ranks.run(body_first_step, "error", True)):
        assert f"rank {rank}: the ranks begin training with different values of 2 of " in text
    (_, first, said), (_, second, _) = keras_two_ranks.run(body_first_step, "ignore", True)
    assert not np.array_equal(first[0], second[0])
    assert said == []


@pytest.mark.parametrize("by_hand", [False, True], ids=["wrapped", "reduced by hand"])
def test_a_model_that_is_built_on_some_ranks_only(keras_two_ranks: Pool, by_hand: bool) -> None:
    found = keras_two_ranks.run(body_first_step, "repair", True, by_hand, (0,))
    if found[0][0]:
        for rank, (text, _, _) in enumerate(found):
            assert (
                f"rank {rank}: at the first step the variables of the model or the optimizer have no values"
                in text
            )
            assert "on rank(s) 1, but" in text
    else:  # tf-keras, which gives them values at once
        same_bits(*(weights for _, weights, _ in found))


@hears
def body_of_this_rank(said: list[str]) -> tuple[list[str], list[float], list[float], list[float]]:
    """A variable that belongs to each rank, beside one that all train; one whose gradients no tape made; and none."""
    rank = npu.open().worker_id
    shared, own, other = (tf.Variable(tf.fill([size], float(rank))) for size in (3, 3, 2))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared * own)
        [reduced] = npu.distribute.all_reduce([tape.gradient(loss, shared)])
        return reduced, npu.distribute.all_reduce([other * 1.0])

    step()
    npu.distribute.broadcast([])
    return said, shared.numpy().tolist(), own.numpy().tolist(), other.numpy().tolist()


def test_what_may_belong_to_a_rank_is_left_alone(two_ranks: Pool) -> None:
    for rank, ([text], *found) in enumerate(two_ranks.run(body_of_this_rank)):
        assert found == [[rank] * 3, [rank] * 3, [rank] * 2]
        assert (
            text.startswith(f"rank {rank}: broadcast was given an empty list")
            and "model.build" in text
        )


def test_ranks_that_train_alone_are_told(tmp_path: Path) -> None:
    forgotten = """
import npu_device as npu
npu.open().as_default()
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(tf.ones([8, 2]), tf.ones([8, 1]), verbose=0)
"""
    together = "".join(job.outputs(tmp_path, 2, forgotten))
    assert together.count("in this job of 2 ranks: each of them ran by itself") == 1
    assert "npu.distribute.replicate(model)" in together


@hears
def body_another_order_of_creation(
    said: list[str], teacher: bool
) -> tuple[list[list[float]], list[str]]:
    """Train two layers of one shape by hand. Rank 0 makes the second one first; or its steps first look at that one and
    at a third one. Return the weights after audited steps, and the warnings.
    """
    x, make = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.keras.layers.Dense
    first, second, other = (
        make(2, use_bias=False, name=name) for name in ("first", "second", "other")
    )
    if npu.distribute.rank() == 0 and not teacher:
        second(x)
    trained = [layer for layer in (first, second, other) if layer(x) is not None][:2]
    weights = [layer.trainable_variables[0] for layer in trained]
    for number, weight in enumerate(weights):
        weight.assign(tf.fill([2, 2], 1.0 + number))

    @tf.function
    def step(x: tf.Tensor) -> None:
        if teacher and npu.distribute.rank() == 0:
            tf.debugging.check_numerics(second(x) + other(x), "teacher")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(first(x))) + 2 * tf.reduce_mean(tf.square(second(x)))
        for weight, gradient in zip(
            weights, npu.distribute.all_reduce(tape.gradient(loss, weights), "mean")
        ):
            weight.assign_sub(0.01 * gradient)

    with settings(NPU_DEVICE_AUDIT="2"):
        for _ in range(5):
            step(x)
    return [tf.reshape(weight, [-1]).numpy().tolist() for weight in weights], said


@pytest.mark.parametrize("teacher", [False, True])
def test_layers_that_ranks_make_in_another_order(keras_two_ranks: Pool, teacher: bool) -> None:
    (weights, said), (others, _) = keras_two_ranks.run(body_another_order_of_creation, teacher)
    assert weights == others
    assert weights[0] != weights[1]
    assert not any("different" in text or "drift" in text for text in said)


def body_other_numbers_in_names(fits: bool) -> float:
    """Train a model with an optimizer that has slots; rank 0 has made other layers before."""
    keras, layer = tf.keras, tf.keras.layers.Dense
    keras.backend.clear_session()
    for _ in range(9 if npu.distribute.rank() == 0 else 0):
        layer(4)  # now automatic names go on with dense_9, which comes after dense_10
    keras.utils.set_random_seed(1)
    mine = keras.Sequential([keras.Input([4]), layer(4), layer(4), layer(4), layer(1)])
    optimizer = keras.optimizers.Adam(0.01)
    x = np.random.RandomState(0).rand(32, 4).astype("f")
    with settings(NPU_DEVICE_AUDIT="2"):
        if fits:
            mine.compile(optimizer, "mse")
            npu.distribute.replicate(mine).fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        else:
            npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
            for _ in range(5):
                descend(mine, lambda: tf.reduce_mean(tf.square(mine(x))), optimizer)
    return float(sum(tf.reduce_sum(weight) for weight in mine.trainable_variables))


@pytest.mark.parametrize("fits", [False, True])
def test_automatic_names_with_other_numbers(keras_two_ranks: Pool, fits: bool) -> None:
    first, second = keras_two_ranks.run(body_other_numbers_in_names, fits)
    assert first == second


def _optimizer_of(kind: str, model: Any) -> Any:
    """Return an optimizer that knows all variables of a model, unless it is a legacy one, in one of the wrappers."""
    kinds = tf.keras.optimizers
    if kind == "legacy":
        kinds = kinds.legacy
    optimizer = kinds.Adam(0.01)
    if kind != "legacy":
        optimizer.build(model.trainable_variables)
    if kind == "replicate":
        # The optimizer of a loop, too, once ``fit`` has trained a part.
        head = tf.keras.Sequential([tf.keras.Input([4]), model.layers[-1]])
        head.compile(optimizer, "mse")
        npu.distribute.replicate(head).fit(np.ones([4, 4]), np.ones([4, 2]), verbose=0)
    elif kind == "horovod":
        hvd.DistributedOptimizer(optimizer)
    else:
        npu.distribute.DistributedOptimizer(optimizer, shard_optimizer=kind == "divided")
    return optimizer


@hears
def body_joining(said: list[str], kinds: list[str], graph: bool) -> Any:
    """Train a head, then what is before it, too; in the last step, the last rank traces its function again alone.

    Return the values of the base after the first part, all at the end, those of passing variables; and the warnings.
    """
    with settings(NPU_DEVICE_AUDIT="1"):
        return {kind: _train_in_parts(kind, graph) for kind in kinds}, said


def _train_in_parts(kind: str, graph: bool) -> tuple[list, list, list]:
    keras, rank = tf.keras, npu.distribute.rank()
    keras.utils.set_random_seed(rank)
    base, head = keras.layers.Dense(4, name="base"), keras.layers.Dense(2, name="head")
    model = keras.Sequential([keras.Input([3]), base, head])
    optimizer = _optimizer_of(kind, model)

    def train_head(x: tf.Tensor) -> None:
        descend(head, lambda: tf.reduce_sum(tf.square(head(x[:, :1] * tf.ones([4])))), optimizer)

    def train_all(x: tf.Tensor) -> None:
        descend(model, lambda: tf.reduce_sum(tf.square(model(x))), optimizer)

    if graph:
        train_head, train_all = map(tf.function, (train_head, train_all))
    x, passing = np.full([3, 3], 1.0 + rank, np.float32), []
    for _ in range(2):
        train_head(tf.constant(x[:2]))
    first = base.get_weights()
    for rows in (2, 2, 2 + rank):
        train_all(tf.constant(x[:rows]))
    for _ in range(3 * (kind == "legacy" and not graph)):
        # Gone when the next one is made, which may get its id.
        variable = tf.Variable([1.0 + rank])
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        passing.append(variable.numpy())
    return first, model.get_weights(), passing


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_variables_that_join_later(keras_two_ranks: Pool, keras: str, graph: bool) -> None:
    kinds = ["wrapper", "horovod", "replicate", "divided" if keras == "3" else "legacy"]
    (results, said), (others, quiet) = keras_two_ranks.run(body_joining, kinds, graph)
    for kind in kinds:
        # An optimizer of tf-keras doesn't tell which variables it knows.
        for part in range(0 if keras == "3" else 1, 3):
            same_bits(results[kind][part], others[kind][part])
    assert quiet == []
    assert all("the ranks begin training with different values of " in text for text in said)
    # Scripts of Horovod may broadcast after the first step.
    expected = {("3", False): 3, ("3", True): 3, ("2", False): 8, ("2", True): 5}
    assert len(said) == expected[keras, graph], said


# What layers hold outside variables.

WORDS = np.array([["a b"], ["b c"], ["c"], ["a"], ["b"], ["d a"]])
NUMBERS = np.array([[1], [2], [3], [1], [2], [9]], np.float32)


def make_layer(kind: str, data: Any, **options: Any) -> Any:
    """Return a layer that has adapted to its data."""
    layer = getattr(tf.keras.layers, kind)(**options)
    layer.adapt(data)
    return layer


def _model(inputs: Any, hidden: Any) -> Any:
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, kernel_initializer="ones")(hidden))
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


def body_preprocessing() -> Any:
    """Fit and predict with layers of two kinds; return the numbers."""
    layers = tf.keras.layers
    words, numbers = tf.keras.Input((1,), dtype="string"), tf.keras.Input((1,))
    vectors = layers.Flatten()(make_layer("TextVectorization", WORDS, output_mode="tf_idf")(words))
    model = _model(
        (words, numbers),
        layers.Concatenate()([vectors, make_layer("Normalization", NUMBERS)(numbers)]),
    )
    npu.distribute.broadcast(model.variables)  # with vocabularies among them, in tf-keras
    model = npu.distribute.replicate(model)
    x = tf.data.Dataset.from_tensor_slices((tf.constant(WORDS), NUMBERS))
    dataset = tf.data.Dataset.zip((x, tf.data.Dataset.range(6))).batch(4)
    history = model.fit(dataset, verbose=0)
    return outcome(
        model.layers[-1],
        history,
        predicted=model.predict(dataset.map(lambda x, y: (x,)), verbose=0),
    )


def body_different(kind: str, how: str = "fit") -> str:
    """Adapt to this rank's part of the data, or hold its number; return the error of ``fit`` or ``broadcast``."""
    rank = npu.distribute.rank()
    pairs = tf.lookup.KeyValueTensorInitializer(
        tf.constant(["a", "b"]), tf.constant([0.0, float(rank)])
    )

    class Holds(tf.keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="layer")
            self.held = (
                tf.lookup.StaticHashTable(pairs, -1.0)
                if kind == "table"
                else np.full((1, 1), rank, "f4")
            )

        def call(self, x: Any) -> Any:
            return x @ self.held if kind == "constant" else tf.reshape(self.held.lookup(x), (-1, 1))

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 1)

    data: Any = WORDS if kind in ("StringLookup", "table") else NUMBERS * (1 + rank)
    if kind in ("table", "constant"):
        layer: Any = Holds()
    else:
        options = {
            "StringLookup": {"output_mode": "multi_hot"},
            "Discretization": {"num_bins": 3},
        }.get(kind, {})
        layer = make_layer(kind, data[rank::2], name="layer", **options)
    inputs = tf.keras.Input((1,), dtype="string" if data.dtype.kind == "U" else "float32")
    model = _model(inputs, layer(inputs))
    if how == "broadcast":
        return error_of(npu.distribute.broadcast, model.variables)
    dataset = tf.data.Dataset.from_tensor_slices((tf.constant(data), tf.ones((6, 1)))).batch(6)
    return error_of(npu.distribute.replicate(model).fit, dataset, verbose=0)


def fit_replicated(model: Any, x: Any, y: Any) -> None:
    npu.distribute.replicate(model).fit(x, y, batch_size=4, verbose=0)


def body_strategies() -> list[str]:
    """Train models made in the scopes of strategies of ``tf.distribute`` with one device."""
    found = []
    for strategy in (
        tf.distribute.MirroredStrategy(["CPU:0"]),
        tf.distribute.OneDeviceStrategy("CPU:0"),
    ):
        with strategy.scope():
            model = tf.keras.Sequential(
                [tf.keras.Input((3,)), tf.keras.layers.Dense(1)], name="of_a_scope"
            )
            model.compile("sgd", "mse")
        x, y = np.ones((8, 3), "f4"), np.ones((8, 1), "f4")
        found.append(error_of(fit_replicated, model, x, y))
    return found


@pytest.mark.once
@pytest.mark.slow
def test_preprocessing_inside_a_model(keras_two_ranks: Pool, keras_single: Pool) -> None:
    compare(keras_two_ranks, keras_single, body_preprocessing)


DIFFERENT = {
    "StringLookup": "vocabulary",
    "Normalization": "mean",
    "Discretization": "bin_boundaries",
}
DIFFERENT |= {"table": "held", "constant": "held"}


@pytest.mark.parametrize(
    "kind",
    [
        "StringLookup",
        pytest.param("Normalization", marks=pytest.mark.full),
        *("Discretization", "table", "constant"),
    ],
)
def test_a_difference_names_the_layer(keras_two_ranks: Pool, kind: str) -> None:
    how = ["fit", *["broadcast"] * (kind == "StringLookup" and keras_two_ranks.keras == "2")]
    for text in (text for one in how for text in keras_two_ranks.run(body_different, kind, one)):
        for part in (
            "layer 'layer'",
            DIFFERENT[kind],
            "rank 0 on host",
            "rank 1 on host",
            "before they are divided",
        ):
            assert part in text


def test_a_model_of_a_strategy(keras_two_ranks: Pool) -> None:
    for refused, trained in keras_two_ranks.run(body_strategies):
        assert (
            "'of_a_scope' was made under MirroredStrategy" in refused
            and "outside strategy.scope()" in refused
        )
        assert trained == ""
