"""XLA: a collective in a function that it compiles is refused on every rank, with the remedy, and never hangs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, hears
from pool import Pool

import npu_device as npu
from npu_device.distribute import hccl_ops
from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

REMEDY = "jit_compile=False"


def body_compiled_functions() -> dict[str, str]:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num

    def add(value: Any) -> Any:
        return npu.distribute.all_reduce(value, "sum")

    def rows(value: Any) -> Any:
        return npu.distribute.all_reduce(
            tf.IndexedSlices(value, tf.constant([0, 1]), tf.constant([4]))
        ).values

    def loop(value: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, value: (i + 1, add(value)), [0, value])[
            1
        ]

    def gradient(value: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = tf.reduce_sum(add(value) * value)
        return tape.gradient(result, value)

    def pair(value: Any) -> Any:
        return hccl_ops.send(value, 0, 1) if rank == 0 else hccl_ops.receive([2], tf.float32, 0, 0)

    traced = tf.function(add)
    functions = {
        "all_reduce": add,
        "a list": lambda value: npu.distribute.all_reduce([value, 2 * value], "mean")[0],
        "joined calls": lambda value: npu.distribute.all_reduce(
            value, "sum", fusion=2, fusion_id=1
        ),
        "sparse": rows,
        "in a loop": loop,
        "in a branch": lambda value: tf.cond(value[0] > 0, lambda: add(value), lambda: value),
        "under a tape": gradient,
        "broadcast": lambda value: hccl_ops.broadcast([value], 0)[0],
        "allgather": lambda value: hccl_ops.allgather(value, size),
    }
    if size == 2:
        functions["send and receive"] = pair
    functions["in a function that has been traced"] = traced
    found = {}
    value = tf.constant([1.0, 2.0])
    traced(value)
    for name, function in functions.items():
        found[name] = error_of(tf.function(function, jit_compile=True), value) or "worked"
    found["afterwards"] = str(add(value).numpy().tolist())
    return found


def test_collectives_in_compiled_functions(ranks: Pool) -> None:
    for found in ranks.run(body_compiled_functions, timeout=60):
        assert found.pop("afterwards") == str([1.0 * ranks.size, 2.0 * ranks.size])
        if ranks.size == 1:
            assert set(found.values()) == {"worked"}
            continue
        # TensorFlow keeps the graph of a traced function, and XLA itself refuses it: it has no kernels for the calls.
        assert "Detected unsupported operations" in found.pop("in a function that has been traced")
        for name, text in found.items():
            assert text.startswith("RuntimeError") and REMEDY in text and "test_xla.py" in text, (
                name,
                text,
            )


@hears
def body_fit(
    messages: list[str], jit_compile: Any, broadcast: bool, replicate: bool
) -> tuple[str, str]:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    if replicate:
        npu.distribute.replicate(model)
    optimizer = tf.keras.optimizers.SGD(0.1)
    if not replicate:
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    callbacks = [NPUBroadcastGlobalVariablesCallback(0)] if broadcast else []
    x, y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")
    result = error_of(model.fit, x, y, verbose=0, callbacks=callbacks) or "trained"
    return result, " ".join(message for message in messages if "jit_compile" in message)


def test_fit_with_xla_trains_after_a_broadcast_or_replicated(keras_two_ranks: Pool) -> None:
    """Without a GPU only ``jit_compile=True`` turns XLA on; on a GPU Keras 3 does so by itself."""
    for result, _ in keras_two_ranks.run(body_fit, True, False, False):
        assert REMEDY in result
    for broadcast, replicate in ((True, False), (False, True)):
        found = keras_two_ranks.run(body_fit, True, broadcast, replicate)
        assert [result for result, _ in found] == ["trained"] * 2
        assert ["XLA can't compile" in note for _, note in found] == [broadcast, False]


@hears
def body_compiled_call(
    messages: list[str], jit_compile: bool, kind: str
) -> tuple[list[Any], int, str]:
    """Train a replicated model; return losses and weights, in how many functions XLA was to compile, and messages."""
    keras = tf.keras
    keras.utils.set_random_seed(5)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="relu")(inputs)
    if kind == "dropping":
        hidden = keras.layers.Dropout(0.5)(hidden)
    if kind == "normalised":
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    model = keras.Model(
        inputs, keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.01))(hidden)
    )
    npu.distribute.replicate(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], jit_compile=jit_compile)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 3)).astype("float32"), random.integers(0, 2, 16)
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x[:8], y[:8])
    )
    step = tf.function(model.train_step, autograph=False)
    definitions = step.get_concrete_function((x[:8], y[:8])).graph.as_graph_def().library.function
    compiled = sum(
        "_XlaMustCompile" in each.attr and each.attr["_XlaMustCompile"].b for each in definitions
    )
    found = [value for values in history.history.values() for value in values]
    return (
        found + [float(np.sum(weights)) for weights in model.get_weights()],
        compiled,
        "\n".join(messages),
    )


@pytest.mark.parametrize("kind", ["plain", "normalised"])
def test_the_call_of_a_replica_is_compiled_with_the_results_of_one_process(
    keras_two_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    """XLA compiles the call of a replicated model, forward and backward, unless its layers communicate; with the
    results of one process.
    """
    [(right, _, _)] = keras_single.run(body_compiled_call, False, kind)
    for rank, (found, compiled, messages) in enumerate(
        keras_two_ranks.run(body_compiled_call, True, kind)
    ):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
        assert compiled >= 2 if kind == "plain" else not compiled
        assert "jit_compile" not in messages or kind == "normalised"
        assert ("normalises over all ranks" in messages) == (kind == "normalised" and rank == 0)


def test_a_dropout_that_xla_would_repeat_on_all_ranks(keras_two_ranks: Pool) -> None:
    """XLA ignores the seeds of tf-keras's dropout. That of Keras 3 draws from a state which the step reads."""
    is_repeated = keras_two_ranks.keras == "2"
    for rank, found in enumerate(keras_two_ranks.run(body_compiled_call, True, "dropping")):
        _, compiled, messages = found
        assert (not compiled) == is_repeated
        assert ("the same numbers on all ranks" in messages) == (is_repeated and rank == 0)
