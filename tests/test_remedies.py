"""Every remedy of ``docs/differs.md`` and of ``npurun verify``, applied to the script that it is given for: then the
result is that of one process.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
import test_verify
from caught_messages import error_of, warnings_of_package
from launcher import ROOT
from pool import Pool
from rank_comparison import same, same_bits

import npu_device as npu
from npu_device._src.verify import causes

SAMPLES = 13  # uneven on 2 and 3 ranks
STEPS = 5

Case = Any  # a compiled model, and the arguments of ``fit``


def _x() -> np.ndarray:
    return np.random.default_rng(3).normal(size=[SAMPLES, 6]).astype("float32")


def _step_model(
    loss: Callable[..., Any] = lambda model, x, y: tf.reduce_mean(
        tf.square(model(x, training=True) - y)
    ),
    change: Callable[..., Any] = lambda gradients: gradients,
    apply: Callable[..., Any] = lambda model, pairs: model.optimizer.apply_gradients(pairs),
    keep: Callable[..., Any] = lambda model, x: None,
    prepare: Callable[..., Any] = lambda x: x,
    logs: Callable[..., Any] = lambda model: {},
    metric: Callable[..., Any] = lambda: tf.keras.metrics.Mean(name="mean"),
    **compiled: Any,
) -> Any:
    """Return a compiled model whose ``train_step`` consists of these parts."""
    keras = tf.keras

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.mean = metric()
            self.bank = self.add_weight(
                name="bank", shape=(8, 3), initializer="zeros", trainable=False
            )
            self.total = self.add_weight(
                name="total", shape=(), initializer="zeros", trainable=False
            )

        def build(self, shape: Any) -> None:
            self.dense.build(shape)
            self.built = True

        def call(self, x: Any) -> Any:
            return self.dense(x)

        @property
        def metrics(self) -> Any:
            return [self.mean]

        def train_step(self, data: Any) -> Any:
            x, y = data if isinstance(data, tuple) else (data, None)
            x = prepare(x)
            with tf.GradientTape() as tape:
                value = loss(self, x, y)
            variables = self.dense.trainable_variables
            gradients = change(tape.gradient(value, variables))
            apply(self, zip(gradients, variables))
            keep(self, x)
            self.mean.update_state(tf.reduce_mean(value))
            return {"value": tf.reduce_mean(value), **logs(self)}

    model = Model()
    model.build((None, 6))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), **compiled})
    return model


def _data() -> dict[str, Any]:
    return {"x": _x(), "y": np.abs(_x()[:, :3])}


def _valid_steps(remedy: str) -> Case:
    keras = tf.keras
    lengths = np.random.default_rng(1).integers(1, STEPS + 1, SAMPLES)
    valid = np.arange(STEPS) < lengths[:, None]
    x = (
        np.random.default_rng(2).normal(size=[SAMPLES, STEPS, 6]).astype("float32")
        * valid[..., None]
    )
    y = np.where(valid, 1 + np.argmax(x[..., :3], axis=2), 0)
    crossentropy = keras.losses.SparseCategoricalCrossentropy

    def mean_of_valid(y: Any, out: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
        sums = [
            tf.reduce_sum(each * tf.cast(y != 0, each.dtype)),
            tf.reduce_sum(tf.cast(y != 0, each.dtype)),
        ]
        if remedy == "all_reduce":
            sums = npu.distribute.all_reduce(sums, "sum")
        return sums[0] / sums[1]

    inputs = keras.Input([STEPS, 6])
    masked = keras.layers.Masking()(inputs) if remedy == "mask" else inputs
    model = keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.Dense(4))(masked))
    built_in = {"mask": {}, "sample_weight": {}, "ignore_class": {"ignore_class": 0}}
    own = remedy not in built_in
    model.compile(
        keras.optimizers.SGD(0.1), mean_of_valid if own else crossentropy(True, **built_in[remedy])
    )
    weights = {"sample_weight": valid.astype("float32")} if remedy == "sample_weight" else {}
    return model, {"x": x, "y": y, **weights}


def _compared(remedy: str) -> Case:
    def loss(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        out = npu.distribute.all_gather(out) if remedy else out
        return tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(out, out, transpose_b=True), axis=1))

    return _step_model(loss), _data()


def _mixed(remedy: str) -> Case:
    keras = tf.keras

    class Centered(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x - tf.reduce_mean(npu.distribute.all_gather(x) if remedy else x, axis=0)

    model = keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(4), Centered(), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, _data()


def _masked_model(has_attribute: bool, make_dense: Callable[[], Any], **compiled: Any) -> Any:
    """Return a model of masked sequences whose ``train_step`` calls a loss object: an attribute, or one of its own."""
    keras = tf.keras

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            error = self.error if has_attribute else keras.losses.MeanSquaredError()
            with tf.GradientTape() as tape:
                loss = error(y, self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"value": loss}

    inputs = keras.Input([400, 6])
    masked = keras.layers.Masking()(inputs)
    model = Model(inputs, make_dense()(masked))
    if has_attribute:
        model.error = keras.losses.MeanSquaredError()
    model.compile(keras.optimizers.SGD(0.01), **compiled)
    return model


def _masked_data() -> dict[str, Any]:
    lengths = np.random.default_rng(1).integers(
        100, 400, SAMPLES
    )  # too many for sums of masks in 16 bits
    x = np.random.default_rng(2).normal(size=[SAMPLES, 400, 6]).astype("float32")
    x *= (np.arange(400) < lengths[:, None])[..., None]
    return {"x": x, "y": x[..., :1]}


def _loss_of_the_step(remedy: str) -> Case:
    # TimeDistributed would be 400 calls in Keras 3.
    return _masked_model(bool(remedy), lambda: tf.keras.layers.Dense(1)), _masked_data()


def _half_precision(remedy: str) -> Case:
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layers = tf.keras.layers
    last = {"dtype": "float32"} if remedy == "float32" else {}

    def make_dense() -> Any:
        return layers.TimeDistributed(layers.Dense(1, **last), **last)

    try:
        model = _masked_model(True, make_dense, run_eagerly=remedy != "no run_eagerly")
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    return model, _masked_data()


def _ragged(remedy: str) -> Case:
    keras = tf.keras
    lengths = [1, 5, 1, 5, 1, 5, 4, 3, 2, 2, 1, 5, 4]
    steps = np.random.default_rng(2).normal(size=[sum(lengths), 6]).astype("float32")
    x, y = (tf.RaggedTensor.from_row_lengths(each, lengths) for each in (steps, steps[:, :1]))
    inputs = keras.Input([None, 6], ragged=not remedy)
    masked = keras.layers.Masking()(inputs) if remedy else inputs
    model = keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.Dense(1))(masked))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, {"x": x.to_tensor() if remedy else x, "y": y.to_tensor() if remedy else y}


def _clips(remedy: str) -> Case:
    def change(gradients: Any) -> Any:
        gradients = npu.distribute.all_reduce(gradients) if remedy == "all_reduce" else gradients
        return tf.clip_by_global_norm(gradients, 0.01)[0]

    if remedy in ("", "all_reduce"):
        return _step_model(change=change), _data()
    return _step_model(optimizer=tf.keras.optimizers.SGD(0.1, **{remedy: 0.01})), _data()


def _by_hand(remedy: str) -> Case:
    def apply(model: Any, pairs: Any) -> None:
        gradients, variables = zip(*pairs)
        gradients = npu.distribute.all_reduce(list(gradients)) if remedy else gradients
        for gradient, variable in zip(gradients, variables):
            variable.assign(tf.convert_to_tensor(variable) - 0.1 * gradient)

    return _step_model(apply=apply), _data()


def _queue(remedy: str) -> Case:
    def keep(model: Any, x: Any) -> None:
        newest = npu.distribute.all_gather(model(x)) if remedy else model(x)
        model.bank.assign(tf.concat([newest, tf.convert_to_tensor(model.bank)], axis=0)[:8])

    return _step_model(keep=keep), _data()


def _sum(remedy: str) -> Case:
    def keep(model: Any, x: Any) -> None:
        total = tf.reduce_sum(x)
        model.total.assign(npu.distribute.all_reduce(total, "sum") if remedy else total)

    return _step_model(keep=keep), _data()


def _quotient(remedy: str) -> Case:
    def keep(model: Any, x: Any) -> None:
        sums = [tf.reduce_sum(x[:, :3], axis=0), tf.reduce_sum(tf.square(x))]
        sums = npu.distribute.all_reduce(sums, "sum") if remedy else sums
        model.bank.assign(tf.tile([sums[0] / sums[1]], [8, 1]))

    return _step_model(keep=keep), _data()


def _start_by_the_batch(remedy: str) -> Case:
    class Scaled(tf.keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(int(shape[-1]),), initializer="ones", name="scale")
            self.ready = self.add_weight(
                shape=(), initializer="zeros", trainable=False, name="ready"
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                square = tf.reduce_mean(tf.square(x), axis=0)
                if remedy == "all_reduce":
                    sums = [
                        tf.reduce_sum(tf.square(x), axis=0),
                        tf.cast(tf.shape(x)[0], tf.float32),
                    ]
                    sums = npu.distribute.all_reduce(sums, "sum")
                    square = sums[0] / sums[1]
                now = tf.convert_to_tensor(self.scale)
                self.scale.assign(
                    tf.where(tf.convert_to_tensor(self.ready) < 0.5, 1 / tf.sqrt(square), now)
                )
                self.ready.assign(1.0)
            return x * tf.convert_to_tensor(self.scale)

    model = tf.keras.Sequential([tf.keras.Input([6]), Scaled(), tf.keras.layers.Dense(3)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    if remedy == "call":
        model(_x(), training=True)
    return model, _data()


def _sharpness_aware(remedy: str) -> Case:
    keras = tf.keras

    class Model(keras.Model):  # type: ignore[misc]
        def gradients(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            return tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> Any:
            x, y = data
            gradients = self.gradients(x, y)
            gradients = npu.distribute.all_reduce(gradients) if remedy else gradients
            norm = tf.linalg.global_norm(gradients)
            for weight, gradient in zip(self.trainable_variables, gradients):
                weight.assign_add(0.1 * gradient / norm)
            beyond = self.gradients(x, y)
            for weight, gradient in zip(self.trainable_variables, gradients):
                weight.assign_sub(0.1 * gradient / norm)
            self.optimizer.apply_gradients(zip(beyond, self.trainable_variables))
            return {"norm": norm}

    inputs = keras.Input([6])
    model = Model(inputs, keras.layers.Dense(3)(inputs))
    model.compile(keras.optimizers.SGD(0.1))
    return model, _data()


def _counts(remedy: str) -> Case:
    def keep(model: Any, x: Any) -> None:
        count = tf.cast(tf.shape(x)[0], tf.float32)
        count = npu.distribute.all_reduce(count, "sum") if remedy == "reduce" else count
        model.total.assign_add(tf.ones([]) if remedy == "steps" else count)

    return _step_model(keep=keep), _data()


def _pairs(remedy: str) -> Case:
    samples_first = remedy == "samples first"
    pairs = np.stack([_x()[:12], _x()[:12] + 1], axis=int(samples_first))
    if remedy == "divided":  # by the script
        pairs = np.split(pairs, npu.distribute.size(), axis=1)[npu.distribute.rank()]
    spec = tf.TensorSpec([None, 2, 6] if samples_first else [2, None, 6])
    dataset = tf.data.Dataset.from_generator(lambda: [pairs, pairs], output_signature=spec)

    def loss(model: Any, x: Any, y: Any) -> Any:
        first, second = tf.unstack(x, num=2, axis=int(samples_first))
        return tf.reduce_mean(tf.square(model(first) - model(second) ** 2))

    return _step_model(loss), {
        "x": npu.distribute.divided(dataset) if remedy == "divided" else dataset
    }


def _weights_per_output(remedy: str) -> Case:
    keras = tf.keras
    reduction = "sum_over_batch_size" if remedy == "reduction" else "mean_with_sample_weight"
    inputs = keras.Input([6])
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    loss = [keras.losses.MeanSquaredError(reduction=reduction) for _ in range(2)]
    model.compile(keras.optimizers.SGD(0.1), loss)
    x = _x()
    weights = (
        np.random.default_rng(2).uniform(size=[SAMPLES]).astype("float32")
    )  # Keras makes two of them
    return model, {"x": x, "y": (x[:, :1], x[:, 1:2]), "sample_weight": weights}


def _computed_from_a_metric(remedy: str) -> Case:
    class Perplexity(tf.keras.metrics.Mean):  # type: ignore[misc]
        def result(self) -> Any:
            return tf.exp(super().result())

    def logs(model: Any) -> Any:
        mean = model.mean.result()
        return (
            {"mean": mean}
            if remedy
            else {"perplexity": tf.numpy_function(np.exp, [mean], tf.float32)}
        )

    def add(epoch: int, logs: Any) -> None:
        logs["perplexity"] = np.exp(logs["mean"])

    model = _step_model(
        logs=logs, **({"metric": lambda: Perplexity("mean")} if remedy == "metric class" else {})
    )
    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=add)
    return model, {**_data(), "callbacks": [callback] if remedy == "callback" else []}


def _resets(remedy: str) -> Case:
    model: Any = None

    def keep(model: Any, x: Any) -> None:
        if not remedy:
            model.mean.reset_state()

    model = _step_model(keep=keep, logs=lambda model: {"mean": model.mean.result()})
    reset = tf.keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: model.mean.reset_state()
    )
    return model, {**_data(), "callbacks": [reset] if remedy else []}


def _needs_values(remedy: str) -> Case:
    def loss(model: Any, x: Any, y: Any) -> Any:
        out = model(x, training=True)
        most = tf.reduce_max(tf.abs(x), axis=1) * 0.1 if remedy else float(tf.constant(0.1).numpy())
        return tf.reduce_mean(tf.square(out - y) * tf.reshape(most, [-1, 1]))

    return _step_model(loss, run_eagerly=not remedy), _data()


def _call_needs_values(remedy: str) -> Case:
    keras = tf.keras

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x) * float(tf.constant(0.5).numpy())

    model = Model()
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    if remedy:
        model.test_on_batch(_x(), _x()[:, :3])
    return model, _data()


def _runs_python(remedy: str) -> Case:
    def prepare(x: Any) -> Any:
        return (
            x if remedy else tf.ensure_shape(tf.numpy_function(np.copy, [x], tf.float32), [None, 6])
        )

    return _step_model(prepare=prepare), _data()


def _shuffles(remedy: str) -> Case:
    data = _data()
    if remedy:
        noise = np.random.default_rng(4).normal(size=data["x"].shape).astype("float32")
        data["x"] = data["x"] + noise
    return _step_model(prepare=lambda x: x if remedy else tf.random.shuffle(x)), data


def _sum_and_penalty(remedy: str) -> Case:
    keras = tf.keras
    if remedy == "in compile":
        penalty = keras.regularizers.L2(0.1)
        model = keras.Sequential(
            [keras.Input([6]), keras.layers.Dense(3, kernel_regularizer=penalty)]
        )
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
        return model, _data()
    reduce = tf.reduce_mean if remedy else tf.reduce_sum

    def loss(model: Any, x: Any, y: Any) -> Any:
        weights = tf.convert_to_tensor(model.dense.kernel)
        return reduce(tf.square(model(x, training=True) - y)) + 0.1 * tf.reduce_sum(
            tf.square(weights)
        )

    return _step_model(loss), _data()


def _compiled_by_xla(remedy: str) -> Case:
    class Twice(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return 2 * x

    model = tf.keras.Sequential([tf.keras.Input([6]), Twice(), tf.keras.layers.Dense(3)])
    model.compile(tf.keras.optimizers.SGD(0.01), "mse", jit_compile=not remedy)
    return model, _data()


FIT: dict[tuple[str, str], tuple[Callable[[str], Case], list[str]]] = {
    ("adds up what its samples give", ""): (_sum_and_penalty, ["mean", "in compile"]),
    ("the loss isn't a mean over them", ""): (
        _valid_steps,
        ["mask", "ignore_class", "sample_weight", "all_reduce"],
    ),
    ("doesn't treat samples one by one", "compares"): (_compared, ["all_gather"]),
    ("doesn't treat samples one by one", "mixes"): (_mixed, ["all_gather"]),
    ("the loss isn't a mean over them", "a loss made in the step"): (
        _loss_of_the_step,
        ["attribute"],
    ),
    ("not checked: the step runs eagerly", "half precision, keras3"): (
        _half_precision,
        ["float32", "no run_eagerly"],
    ),
    ("the loss isn't a mean over them", "ragged, keras2"): (_ragged, ["dense"]),
    ("clips or changes gradients", ""): (
        _clips,
        ["all_reduce", "clipnorm", "global_clipnorm", "clipvalue"],
    ),
    ("without an optimizer", ""): (_by_hand, ["all_reduce"]),
    ("npu.distribute.all_gather", "queue"): (_queue, ["all_gather"]),
    ("or reduce what is added first", "sum"): (_sum, ["all_reduce"]),
    ("from sums or means over the samples", ""): (_quotient, ["all_reduce"]),
    ("from sums or means over the samples", "start"): (_start_by_the_batch, ["all_reduce", "call"]),
    ("moves weights by gradients", ""): (_sharpness_aware, ["all_reduce"]),
    ("count steps, not samples", ""): (_counts, ["steps", "reduce"]),
    ("divides a batch among the", ""): (_pairs, ["samples first", "divided"]),
    ("sample weights for each output", "keras3"): (_weights_per_output, ["reduction"]),
    ("from a metric's result", ""): (_computed_from_a_metric, ["metric class", "callback"]),
    ("called reset_state of its metric", ""): (_resets, ["callback"]),
    ("traced tensors have no values", ""): (_needs_values, ["tensors"]),
    ("traced tensors have no values", "call, keras3"): (_call_needs_values, ["test_on_batch"]),
    ("jit_compile is off", ""): (_compiled_by_xla, ["jit_compile=False"]),
    ("not checked: the step runs", ""): (_runs_python, ["no Python"]),
    ("not checked: the step draws", ""): (_shuffles, ["with the data"]),
}
"""What a message says, and a remark; the script that gets it, and its remedies."""


STILL_SAID = {
    "float32": "not checked: the step runs eagerly",
    "test_on_batch": "not checked: the step can't run on a few samples",
    "divided": "not checked: the step can't run on a part of a rank's batch",
}
"""What ``fit`` says under some remedies, whose results are right all the same."""


def body_fit(number: int, remedy: str) -> dict[str, Any]:
    """Return what ``fit`` says, and what comes of it."""
    tf.keras.utils.set_random_seed(1)
    model, data = list(FIT.values())[number][0](remedy)
    arguments = (
        {"batch_size": SAMPLES, **data} if isinstance(data["x"], (np.ndarray, tf.Tensor)) else data
    )
    printed = io.StringIO()
    with warnings_of_package() as said, contextlib.redirect_stderr(printed):
        model = npu.distribute.replicate(model)
        error = error_of(model.fit, **arguments, epochs=3, verbose=0, shuffle=False)
    checks = [line for line in printed.getvalue().splitlines() if "not checked" in line]
    logs = {} if error else dict(model.history.history)
    outcome = {"weights": [np.asarray(weight) for weight in model.get_weights()], "logs": logs}
    return {"said": "\n".join([error, *said, *checks]).strip(), "outcome": outcome}


ELSEWHERE = {
    "the ranks add up": "test_own_steps.py, which needs no remedy",
    "saves the model … by a function": "test_files.py",
}
"""Other messages of the page, and the tests of their remedies."""


def test_every_message_of_the_page_has_a_remedy() -> None:
    page = (ROOT / "docs" / "differs.md").read_text()
    tables = page.split("## Messages of the first step")[1].split("## In a custom training loop")[0]
    quoted = [
        re.findall('"([^"]+)"', row.split("|")[2])
        for row in tables.splitlines()
        if row.count("|") == 4
    ]
    said = [text for texts in quoted for text in texts if text not in ELSEWHERE]
    assert len(said) > 10
    for text in said:
        assert (
            any(text in message or message.startswith(text) for message, _ in FIT) or "…" in text
        ), text


_before: dict[Any, str] = {}  # what scripts without a remedy are told


def _marks(number: int, is_first: bool) -> list[Any]:
    marks = [] if is_first and number % 4 == 0 else [pytest.mark.full]
    _, remark = list(FIT)[number]
    if remark.endswith(("keras2", "keras3")):
        marks.append(pytest.mark.only_keras(remark[-1]))
    return marks


KINDS = [
    pytest.param(number, remedy, marks=_marks(number, remedy == remedies[0]))
    for number, (_, remedies) in enumerate(FIT.values())
    for remedy in remedies
]


@pytest.mark.parametrize(("number", "remedy"), KINDS)
def test_the_remedy_of_each_message_makes_fit_right(
    several_keras_ranks: Pool, keras_single: Pool, keras: str, number: int, remedy: str
) -> None:
    message, _ = list(FIT)[number]
    key = (several_keras_ranks.size, keras, number)
    if key not in _before:
        _before[key] = " ".join(several_keras_ranks.run(body_fit, number, "")[0]["said"].split())
    assert message in _before[key]
    after = several_keras_ranks.run(body_fit, number, remedy)
    [alone] = keras_single.run(body_fit, number, remedy)
    for rank in after:
        assert rank["said"] == "" or STILL_SAID.get(remedy, "\n") in rank["said"]
        same(rank["outcome"], alone["outcome"])
    same_bits(*(rank["outcome"]["weights"] for rank in after))


def _loop(cause: str, **remedy: str) -> str:
    """Return the loop that has a cause, changed by its remedy."""
    parts = {**test_verify.RIGHT, **test_verify.WRONG[cause], **remedy}
    source = test_verify.LOOP.format(**{name: text.strip("\n") for name, text in parts.items()})
    source = source.replace("npu.open(seed=1).as_default()\n", "")
    return re.sub(r"(?s)\nif not rank:.+(?=\nfor x, y in)", "", source)


def _fit(step: str) -> str:
    """Return a training whose ``train_step`` is this."""
    source = test_verify.FIT.replace("npu.open(seed=1).as_default()\n", "")
    parts = {"model": test_verify.REPLICATED, "optimizer": "SGD(0.1)", "eager": False, "batch": 10}
    return source.format(step=step.strip("\n"), **parts)


_REDUCED = test_verify.RIGHT["reduce"]
_SUM = 'gradients = npu.distribute.all_reduce(gradients, "sum")'
_DATA = test_verify.RIGHT["data"]
_ADAPT = """
lookup = tf.keras.layers.IntegerLookup(max_tokens=9)
lookup.adapt(dataset.map(lambda x, y: tf.cast(9 * x[:1], tf.int64)).batch(12))
"""
_SHUFFLED = "dataset = dataset.shuffle(48, seed=1)\n" + _DATA
_ALONE = test_verify.WRONG["normalized alone"]["model"].replace("(synchronized=True)", "()")
_COMPARED = test_verify.WRONG["unknown"]["loss"]
LOOPS: dict[str, list[str]] = {
    "other variables": [_loop("other variables", reduce=_REDUCED)],
    "adapt saw part of the data": [_loop("adapt saw part of the data", data=_ADAPT + _DATA)],
    "shuffle seed differs per rank": [_loop("shuffle seed differs per rank", data=_SHUFFLED)],
    "different starts": [
        _loop(
            "different starts",
            start=test_verify.WRONG["different starts"]["start"]
            + "\nnpu.distribute.broadcast(model.weights)",
        )
    ],
    "discarded result": [_loop("discarded result", reduce=_REDUCED)],
    "only the loss is reduced": [
        _loop(
            "only the loss is reduced",
            reduce=_REDUCED + "\n    loss = npu.distribute.all_reduce(loss)",
        )
    ],
    "not reduced": [
        _loop("not reduced", reduce=_REDUCED),
        _loop(
            "not reduced",
            optimizer="SGD(0.1)\noptimizer = npu.distribute.DistributedOptimizer(optimizer)",
        ),
    ],
    "updates differ per rank": [_loop("updates differ per rank", optimizer="SGD(0.1)")],
    "not repeatable": [
        _loop(
            "not repeatable",
            data=test_verify.WRONG["not repeatable"]["data"].replace("rng()", "rng(1)"),
            reduce=_REDUCED,
        )
    ],
    "same samples": [_loop("same samples", data=_DATA)],
    "random numbers": [
        _loop(
            "random numbers",
            data="noise = numbers.normal(size=y.shape).astype('float32')\n"
            f"dataset = tf.data.Dataset.from_tensor_slices((x, y + noise))\n{_DATA}",
            loss=test_verify.RIGHT["loss"],
        )
    ],
    "different samples": [_loop("different samples", data=_SHUFFLED)],
    "normalized alone": [
        _loop("normalized alone", start="npu.distribute.broadcast(model.weights)"),
        _loop(
            "normalized alone",
            model=_ALONE.replace("tf.keras.layers.Batch", "npu.distribute.SyncBatch"),
        ),
    ],
    "clipped before the reduction": [
        _loop(
            "clipped before the reduction",
            reduce=_REDUCED + "\n    gradients, _ = tf.clip_by_global_norm(gradients, 0.01)",
        )
    ],
    "add_loss per sample": [
        _loop(
            "add_loss per sample",
            model=test_verify.PENALTY.replace(
                "tf.reduce_sum(tf.square(x), axis=1) / 12",
                "tf.reduce_mean(tf.reduce_sum(tf.square(x), axis=1))",
            ),
        )
    ],
    "global batch size": [
        _loop("global batch size", loss="tf.reduce_mean(tf.square(z - y)[:, 0])"),
        _loop("global batch size", reduce=_SUM),
    ],
    "sum averaged": [
        _loop("sum averaged", loss="tf.reduce_mean(tf.square(z - y))"),
        _loop("sum averaged", reduce=_SUM),
    ],
    "mean summed": [_loop("mean summed", reduce=_REDUCED)],
    "state in the step": [
        _fit(test_verify.QUEUE.replace("z[:1]", "npu.distribute.all_gather(z)[:1]")),
    ],
    "scaled rate": [_loop("scaled rate", optimizer="SGD(0.1)")],
    "updates by the number of ranks": [
        _loop("updates by the number of ranks", optimizer="SGD(0.1)")
    ],
    "different updates": [_loop("different updates", optimizer="AdamW(0.1, weight_decay=0.2)")],
    "unknown": [_loop("unknown", loss=_COMPARED.replace("z", "npu.distribute.all_gather(z)"))],
    "fewer steps": [_loop("fewer steps", data=_DATA + "\ndataset = dataset.take(2)")],
    "metric of sums": [_fit(test_verify.OWN_METRIC.replace("tf.reduce_sum(z)", "z"))],
    "different logs": [
        _fit(test_verify.LOCAL_LOG.replace("tf.reduce_max(z)", "tf.reduce_mean(z)")),
        _fit(test_verify.OWN_METRIC.replace("tf.reduce_sum(z)", "z")),
    ],
}
"""Scripts for which ``verify`` names a cause, changed as ``causes.md`` says. Those of Horovod's names and scripts
without a call are in ``test_verify.py``."""

ALL = "import npu_device as npu\nnpu.open(seed=1).as_default()\nimport glob, runpy\n"
ALL += "for path in sorted(glob.glob('*/part*.py')):\n    runpy.run_path(path)\n"


@pytest.mark.parametrize(
    ("number", "step"),
    [
        pytest.param(4, 6, id="2ranks-keras3-every sixth"),
        pytest.param(4, 1, id="2ranks-keras3", marks=pytest.mark.full),
        pytest.param(1, 1, id="3ranks-keras3", marks=pytest.mark.full),
        pytest.param(3, 1, id="2ranks-keras2", marks=pytest.mark.full),
        pytest.param(9, 1, id="3ranks-keras2", marks=pytest.mark.full),
    ],
)
def test_remedies_of_verify(number: int, step: int, tmp_path: Path) -> None:
    """All of them are phases of one script."""
    (tmp_path / "parts").mkdir()
    sources = [source for sources in LOOPS.values() for source in sources][::step]
    for place, source in enumerate(sources):
        (tmp_path / "parts" / f"part{place:02}.py").write_text(source)
    verdict = test_verify.verified(tmp_path, ALL, "", number, seconds=300.0)
    assert not verdict.missed
    assert set(re.findall(r"part\d\d", "".join(verdict.table))) == {
        f"part{place:02}" for place in range(len(sources))
    }


def test_every_cause_has_a_remedy() -> None:
    others = {
        "script does not use npu_device",
        *(name for name in causes.TEXTS if name.startswith("Horovod")),
    }
    assert set(LOOPS) == set(causes.TEXTS) - others


def body_loop(global_batch: int) -> tuple[dict[str, Any], int]:
    """Return what comes of a custom loop by the remedies of the table of symptoms, and a number of batches."""
    keras = tf.keras
    size = npu.distribute.size()
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.1)
    error = keras.metrics.MeanSquaredError()
    losses = []
    npu.distribute.broadcast(model.weights)
    whole = tf.data.Dataset.from_tensor_slices(_x())
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(whole, global_batch)
    for x in dataset.batch(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - x[:, :3]))
        gradients = tape.gradient(loss, model.trainable_variables)
        # Of the last five samples, rank 0 has one more than rank 1.
        loss, *gradients = npu.distribute.weighted_mean([loss, *gradients], len(x))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        error.update_state(x[:, :3], model(x))
        losses.append(float(loss))
    results = npu.distribute.metric_results([error])
    weights = [np.asarray(weight) for weight in model.get_weights()]
    # Without take, rank 0 has one batch more.
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(whole.take(SAMPLES // size * size), 6)
    outcome = {"weights": weights, "losses": losses, "error": float(results[error.name])}
    return outcome, len(list(dataset.batch(batch)))


def test_the_remedy_of_a_message_in_a_loop_makes_ranks_train_like_one_process(
    several_keras_ranks: Pool, keras_single: Pool
) -> None:
    global_batch = {2: 8, 3: 9}[several_keras_ranks.size]
    [(alone, _)] = keras_single.run(body_loop, global_batch)
    for outcome, batches in several_keras_ranks.run(body_loop, global_batch):
        same(outcome, alone)
        assert batches == 2
