"""Synchronized batch normalization in loops of the script: moments and gradients are those of one process."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caught_messages import hears
from combinations import combinations
from pool import Pool
from rank_comparison import TOLERANCE, compare

SAMPLES = 12


def shares(size: int, uneven: bool) -> list[np.ndarray]:
    """Return the numbers of each rank's samples; ``uneven``: the first rank has all but one of each other."""
    every = np.arange(SAMPLES)
    return (
        np.split(every, range(SAMPLES - size + 1, SAMPLES))
        if uneven
        else np.array_split(every, size)
    )


def make_model(layer: Any, dtype: str | None = None) -> Any:
    import tensorflow as tf

    keras = tf.keras

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.before = keras.layers.Dense(6, activation="tanh", dtype=dtype)
            self.layer = layer
            self.after = keras.layers.Dense(1, dtype="float32")

        def call(self, inputs: Any, training: Any = False, mask: Any = None) -> Any:
            hidden = self.layer(self.before(inputs), training=training, mask=mask)
            return self.after(hidden if mask is None else tf.reduce_sum(hidden, axis=1))

    return Net()


@contextlib.contextmanager
def other_scope() -> Iterator[None]:
    """Open a scope of the script around the variables that are made in it."""
    import tensorflow as tf

    with tf.variable_creator_scope(lambda next_creator, **keywords: next_creator(**keywords)):
        yield


MADE_LATER = {
    "wrapped before a cleared session": contextlib.nullcontext,
    "wrapped before a model of a thread": contextlib.nullcontext,
    "wrapped in another thread": contextlib.nullcontext,
    "wrapped in another scope": other_scope,
}


def forget_layers() -> None:
    """End what an earlier body has told the package: that the ranks train the layers together."""
    from npu_device._src.collectives import job
    from npu_device._src.training.distribute.normalization import Loops
    from npu_device._src.training.distribute.synchronized_layers import SynchronizedLayers

    if job.current() is not None:
        job.current().end(SynchronizedLayers)
        job.current().add(Loops())


def body_loop(
    found_by: str, graph: bool, reduced_by: str = "mean", uneven: bool = False, options: Any = None
) -> Any:
    """Train in a loop; ``found_by`` is what tells the package of the layer."""
    import tensorflow as tf

    import npu_device as npu

    keras, distribute = tf.keras, npu.distribute
    forget_layers()
    keras.utils.set_random_seed(1)
    options = dict(options or {})
    masked, dtype = options.pop("masked", False), options.pop("dtype", None)
    random = np.random.default_rng(0)
    x = random.normal(1, 3, [SAMPLES, 5, 4] if masked else [SAMPLES, 4]).astype(np.float32)
    y = random.normal(size=[SAMPLES]).astype(np.float32)
    mask = (np.arange(5) < random.integers(1, 6, [SAMPLES, 1])) if masked else None
    optimizer = keras.optimizers.SGD(0.1)
    if found_by in ("wrapped before the model", *MADE_LATER):
        with MADE_LATER.get(found_by, contextlib.nullcontext)():
            if found_by == "wrapped in another thread":
                with ThreadPoolExecutor() as pool:
                    optimizer = pool.submit(distribute.DistributedOptimizer, optimizer).result()
            else:
                optimizer = distribute.DistributedOptimizer(optimizer)
    if found_by == "wrapped before a cleared session":
        keras.backend.clear_session()
    kind = keras.layers.BatchNormalization
    if found_by == "its class":
        kind = distribute.SyncBatchNormalization
    else:
        options["synchronized"] = True
    model = make_model(kind(momentum=0.8, dtype=dtype, **options), dtype)

    def call_once() -> None:
        model(x[:1], mask=None if mask is None else mask[:1])

    if found_by == "broadcast before a model of a thread":
        distribute.broadcast(tf.Variable(0.0))
    if found_by.endswith("a model of a thread"):
        builder = threading.Thread(target=call_once)
        builder.start()
        builder.join()
    if found_by == "wrapped":
        optimizer = distribute.DistributedOptimizer(optimizer)
    if found_by == "broadcast":
        call_once()
        distribute.broadcast(model.trainable_variables)

    def step(x: Any, y: Any, mask: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.square(tf.squeeze(model(x, training=True, mask=mask), 1) - y)
            loss = (
                tf.reduce_sum(losses) / SAMPLES if reduced_by == "sum" else tf.reduce_mean(losses)
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        if reduced_by == "weights":
            gradients = distribute.weighted_mean(gradients, tf.shape(x)[0])
        elif "wrapped" not in found_by:
            gradients = distribute.all_reduce(gradients, reduced_by)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    call = tf.function(step) if graph else step
    for number in range(4):
        # The first step of an eager loop is even.
        mine = shares(distribute.size(), uneven and (graph or number > 0))[distribute.rank()]
        call(x[mine], y[mine], None if mask is None else mask[mine])
    # Inference is no collective: one rank alone can do it.
    outputs = np.asarray(model(x, mask=mask)).tolist() if distribute.is_main() else None
    outputs = distribute.broadcast_object(outputs)
    return {
        "weights": [np.asarray(value).tolist() for value in model.get_weights()],
        "outputs": outputs,
    }


MODES = ["eager", "function"]
FOUND_BY = ["wrapped", "wrapped before the model", "broadcast", "its class", *MADE_LATER]


@pytest.mark.parametrize(("found_by", "mode"), combinations(FOUND_BY, MODES))
def test_a_normalizing_loop_is_trained_exactly_as_one_process(
    several_keras_ranks: Pool, keras_single: Pool, found_by: str, mode: str
) -> None:
    compare(several_keras_ranks, keras_single, body_loop, found_by, mode == "function")


PARAMETERS = ["both", "scale", "center", "neither"]


@pytest.mark.parametrize(
    ("found_by", "parameters", "mode"),
    combinations(["wrapped before the model", *MADE_LATER], PARAMETERS, MODES, usual=6),
)
def test_a_layer_with_a_mask_that_is_made_later(
    several_keras_ranks: Pool, keras_single: Pool, found_by: str, parameters: str, mode: str
) -> None:
    options = {
        "masked": True,
        "scale": parameters in ("both", "scale"),
        "center": parameters in ("both", "center"),
    }
    arguments = found_by, mode == "function", "mean", False, options
    # Without a scale, rounding grows from step to step.
    compare(several_keras_ranks, keras_single, body_loop, *arguments, tolerance=1e-3)


VARIANTS = {
    "uneven, sums": ("sum", True, {}),
    "uneven, weighted": ("weights", True, {}),
    "masked": ("mean", False, {"masked": True}),
    "uneven, masked, weighted": ("weights", True, {"masked": True}),
    "renorm": ("mean", False, {"renorm": True}),
    "mixed precision": ("mean", False, {"dtype": "mixed_float16"}),
}


@pytest.mark.parametrize(("variant", "mode"), combinations(list(VARIANTS), MODES))
def test_variants_of_normalization_train_as_in_one_process(
    several_keras_ranks: Pool, keras_single: Pool, variant: str, mode: str
) -> None:
    reduced_by, uneven, options = VARIANTS[variant]
    tolerance = 5e-3 if "mixed" in variant else TOLERANCE
    arguments = "its class", mode == "function", reduced_by, uneven, options
    compare(several_keras_ranks, keras_single, body_loop, *arguments, tolerance=tolerance)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_a_layer_of_a_thread_with_uneven_batches(
    several_keras_ranks: Pool, keras_single: Pool, graph: bool
) -> None:
    arguments = "broadcast before a model of a thread", graph, "weights", True
    compare(several_keras_ranks, keras_single, body_loop, *arguments)


def body_one_call_less() -> str:
    import tensorflow as tf

    import npu_device as npu

    layer = npu.distribute.SyncBatchNormalization()
    layer(tf.ones([2, 3]), training=True)
    try:
        if npu.distribute.rank() > 0:
            layer(tf.ones([2, 3]), training=True)
        npu.distribute.all_reduce([tf.ones([4])])
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_calls_a_layer_more_often(several_ranks: Pool) -> None:
    for text in several_ranks.run(body_one_call_less):
        assert text.startswith("MismatchError") and "rank 1" in text, text


@hears
def body_not_found(said: list[str], graph: bool) -> list[str]:
    """Train two layers in a loop that reduces gradients only; return what the package warns of."""
    import tensorflow as tf

    import npu_device as npu

    keras, distribute = tf.keras, npu.distribute
    forget_layers()
    kind = keras.layers.BatchNormalization
    layer = kind(synchronized=True, name="unknown", momentum=0.0)
    layer.build([None, 3])
    teacher = kind(synchronized=True, trainable=False)
    teacher(tf.ones([1, 3]))
    optimizer = keras.optimizers.SGD(0.1)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x, training=True)))
        gradients = distribute.all_reduce(tape.gradient(loss, layer.trainable_variables))
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables))

    call = tf.function(step) if graph else step
    for _ in range(3):
        call(tf.fill([2, 3], float(distribute.rank())))
    assert float(np.asarray(layer.moving_mean)[0]) == distribute.rank()
    return said


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_a_layer_that_is_not_found(several_keras_ranks: Pool, graph: bool) -> None:
    """A warning in the first step, on rank 0, names the layer; none names a layer that doesn't train."""
    first, *others = several_keras_ranks.run(body_not_found, graph)
    [text] = first
    assert "by itself: 'unknown'.\n" in text and "npu.distribute.SyncBatchNormalization" in text
    assert not any(others)


@hears
def body_traced_before(said: list[str], is_synchronized: bool) -> list[str]:
    """Trace a function that calls a layer, wrap the optimizer, and train; return what the package warns of."""
    import tensorflow as tf

    import npu_device as npu

    keras, distribute = tf.keras, npu.distribute
    forget_layers()
    layer = keras.layers.BatchNormalization(synchronized=True, name="early", momentum=0.0)
    layer.build([None, 3])

    @tf.function
    def forward(x: Any) -> Any:
        return layer(x, training=True)

    x = tf.fill([2, 3], float(distribute.rank()))
    if is_synchronized:
        distribute.broadcast(layer.trainable_variables)
    forward(x)
    optimizer = distribute.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(forward(x)))
    gradients = tape.gradient(loss, layer.trainable_variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
    expected = (distribute.size() - 1) / 2 if is_synchronized else distribute.rank()
    assert float(np.asarray(layer.moving_mean)[0]) == expected
    return said


def test_a_function_that_was_traced_before_the_optimizer_was_wrapped(
    several_keras_ranks: Pool,
) -> None:
    first, *others = several_keras_ranks.run(body_traced_before, False)
    [text] = first
    assert "traced too early: 'early' in forward.\n" in text
    assert "before the first call of the function" in text
    assert not any(others)
    assert not any(several_keras_ranks.run(body_traced_before, True))


def body_saved(directory: str) -> None:
    import tensorflow as tf

    import npu_device as npu

    keras, distribute = tf.keras, npu.distribute
    layer = distribute.SyncBatchNormalization(axis=-1, momentum=0.5)
    config = layer.get_config()
    assert (
        config["momentum"] == 0.5
        and distribute.SyncBatchNormalization.from_config(config).momentum == 0.5
    )
    for wrong in ({"fused": True}, {"synchronized": False}):
        with pytest.raises(ValueError, match="SyncBatchNormalization"):
            distribute.SyncBatchNormalization(**wrong)
    plain = keras.layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input([3]), layer, plain])
    distribute.broadcast(model.weights)
    model(tf.ones([2, 3]), training=True)
    if distribute.is_main():  # neither saving nor what is saved is a collective
        path = f"{directory}/{distribute.size()}.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        assert type(loaded.layers[0]) is distribute.SyncBatchNormalization
        np.testing.assert_array_equal(loaded(tf.ones([2, 3])), model(tf.ones([2, 3])))
        tf.saved_model.save(model, f"{directory}/{distribute.size()}")
        tf.saved_model.load(f"{directory}/{distribute.size()}")
        copy = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(copy(tf.ones([2, 3])), model(tf.ones([2, 3])))


def test_layers_are_saved_and_loaded(keras_ranks: Pool, tmp_path: Path) -> None:
    keras_ranks.run(body_saved, str(tmp_path))


@hears
def body_uneven_first_step(said: list[str]) -> list[str]:
    import tensorflow as tf

    import npu_device as npu

    distribute = npu.distribute
    layer = distribute.SyncBatchNormalization()

    x = tf.Variable(tf.ones([2, 3]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x, training=True))
    distribute.all_reduce([tape.gradient(loss, x)])
    assert not said, said
    x = tf.Variable(tf.ones([1 + distribute.rank(), 3]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x, training=True))
    tape.gradient(loss, x)
    for _ in range(2):
        distribute.weighted_mean([tf.ones([3])], 1 + distribute.rank())
    return said


def test_an_uneven_first_step_whose_gradients_are_weighted_later(two_ranks: Pool) -> None:
    """In eager mode, the backward pass of the first step can't know that ``weighted_mean`` comes."""
    for said in two_ranks.run(body_uneven_first_step):
        [text] = said
        assert (
            "different numbers of samples in the first step" in text
            and "What to do: begin with" in text
        )
