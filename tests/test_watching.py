"""What is noticed while ranks train: gradients that aren't reduced, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import hears, settings
from combinations import combinations
from pool import Pool

import npu_device as npu

REDUCED = [
    "wrapped",
    "loss scale",
    "by hand",
    "sum",
    "one by one",
    "clipped",
    "clipped weights",
    "collected",
]
REDUCED += ["on rank 0", "weights", "values of weights", "weights, later"]
APART = "the ranks apply gradients that were not reduced: the optimizer "


def optimizer_of(kind: str) -> Any:
    """Return an optimizer, such as ``garden``, the model garden's AdamWeightDecay, for tf-keras."""
    optimizers = tf.keras.optimizers
    if kind == "garden":
        from official.modeling.optimization.legacy_adamw import AdamWeightDecay

        return AdamWeightDecay(1e-3, weight_decay_rate=0.01)
    if kind == "lamb" and not hasattr(optimizers, "Lamb"):
        from official.modeling.optimization.lamb import LAMB

        return LAMB(1e-3)
    if kind == "lamb":
        return optimizers.Lamb(1e-3)
    if kind == "ema":
        return optimizers.SGD(1e-2, momentum=0.9, use_ema=True, ema_overwrite_frequency=5)
    return optimizers.AdamW(1e-3, weight_decay=0.01) if kind == "adamw" else optimizers.SGD(1e-2)


@hears
def body_trains(
    said: list[str], how: str, graph: bool, steps: int = 10, kind: str = "sgd"
) -> list[str]:
    """Train in one of several ways, with an optimizer of ``optimizer_of``, and return what this rank said."""
    keras, rank = tf.keras, npu.distribute.rank()
    keras.utils.set_random_seed(1 + rank)
    model = keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    )
    if how != "broadcast later":
        npu.distribute.broadcast(model.variables)
    optimizer = optimizer_of(kind)
    if how in ("wrapped", "loss scale"):
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    if how == "loss scale":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    variables = model.trainable_variables
    if how == "weights, later":  # local SGD that says so
        npu.distribute.all_reduce(variables)
    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    def gradients_of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1) ** 2)
        return loss, tape.gradient(loss, variables)

    def step(x: Any) -> Any:
        loss, gradients = gradients_of(x)
        if how in ("by hand", "sum", "broadcast later", "clipped weights"):
            gradients = npu.distribute.all_reduce(gradients, "sum" if how == "sum" else "mean")
        elif how == "one by one":
            gradients = [npu.distribute.all_reduce(gradient) for gradient in gradients]
        elif how == "clipped":
            gradients, _ = tf.clip_by_global_norm(npu.distribute.all_reduce(gradients), 1e-3)
        elif how == "collected":
            for own, reduced in zip(sums, npu.distribute.all_reduce(gradients)):
                own.assign(0.5 * own + reduced)
            gradients = [own + 0.0 for own in sums]
        elif how == "half":
            gradients = [*npu.distribute.all_reduce(gradients[:2]), *gradients[2:]]
        elif how == "half, clipped":
            half = [*npu.distribute.all_reduce(gradients[:2]), *gradients[2:]]
            gradients, _ = tf.clip_by_global_norm(half, 1e-3)
        elif how == "discarded":
            npu.distribute.all_reduce(gradients)
        elif how == "loss only":
            npu.distribute.all_reduce(loss)
        optimizer.apply_gradients(zip(gradients, variables))
        if how in ("weights", "values of weights"):  # local SGD
            read = (
                variables
                if how == "weights"
                else [tf.convert_to_tensor(variable) for variable in variables]
            )
            for variable, mean in zip(variables, npu.distribute.all_reduce(read)):
                variable.assign(mean)
        elif how == "clipped weights":
            for variable in variables:
                variable.assign(tf.clip_by_value(variable, -0.2, 0.2))
        return loss

    def step_on_rank_0(x: Any) -> None:
        _, gradients = gradients_of(x)
        if rank == 0:
            optimizer.apply_gradients(zip(gradients, variables))

    call: Any = step_on_rank_0 if how == "on rank 0" else step
    call = tf.function(call, jit_compile=how == "loss beside XLA" or None) if graph else call
    rng = np.random.default_rng(rank)
    for number in range(steps):
        loss = call(tf.constant(rng.normal(size=(4, 6)), tf.float32))
        if how == "loss beside XLA":
            npu.distribute.all_reduce(loss)
        if how == "broadcast later" and number == 0:  # as in Horovod's examples
            npu.distribute.broadcast(model.variables)
    npu.distribute.barrier()
    return said


def body_audited(how: str, graph: bool, kind: str) -> list[str]:
    with settings(NPU_DEVICE_AUDIT="1"):
        return body_trains(how, graph, 12, kind)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("how", "graph", "kind"),
    [
        ("wrapped", True, "lamb"),
        ("wrapped", True, "ema"),
        pytest.param("wrapped", True, "garden", marks=pytest.mark.only_keras("2")),
        ("loss scale", False, "sgd"),
        ("by hand", False, "sgd"),
        ("by hand", True, "adamw"),
        ("sum", True, "lamb"),
        ("one by one", True, "sgd"),
        ("clipped", False, "sgd"),
        ("clipped weights", False, "sgd"),
        ("collected", True, "sgd"),
        ("on rank 0", False, "sgd"),
        ("weights", True, "sgd"),
        ("values of weights", False, "sgd"),
        ("weights, later", True, "sgd"),
        ("broadcast later", False, "sgd"),
        *(
            pytest.param(how, graph, "sgd", marks=pytest.mark.full)
            for how in REDUCED
            for graph in (False, True)
        ),
    ],
)
@pytest.mark.parametrize(
    "several_keras_ranks", [2, pytest.param(3, marks=pytest.mark.full)], indirect=True
)
def test_there_is_no_false_alarm(
    several_keras_ranks: Pool, how: str, graph: bool, kind: str
) -> None:
    """Also while every step is audited."""
    assert not any(several_keras_ranks.run(body_audited, how, graph, kind))


NOT_REDUCED = ["discarded", "loss only", "half", "half, clipped", "loss beside XLA"]


@pytest.mark.parametrize(("how", "mode"), combinations(NOT_REDUCED, ["eager", "function"]))
def test_gradients_that_are_not_reduced_are_named_within_ten_steps(
    keras_two_ranks: Pool, how: str, mode: str
) -> None:
    results = keras_two_ranks.run(body_trains, how, mode == "function")
    [text] = [text for texts in results for text in texts]
    assert text.startswith("the ranks apply gradients that were not reduced")
    assert re.search(": the optimizer SGD has made (4|7|10) steps", text), text
    assert ("dense_1/" in text.partition(":")[0]) is (how == "half"), text
    assert (
        "the result of all_reduce isn't used" in text
        and "only the loss is reduced, for printing" in text
    )
    assert "npu.distribute.all_reduce(gradients) before they are applied" in text


LOADED = """
import os, sys
import npu_device as npu
npu.open().as_default()
import numpy as np
import tensorflow as tf
keras, rank, size = tf.keras, npu.distribute.rank(), npu.distribute.size()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")

def local_sgd(weight):  # averages for the first time after all early looks
    local = keras.optimizers.SGD(0.1)
    for step in range(24):
        local.apply_gradients([(tf.fill(weight.shape, rank + 1.0 + step), weight)])
        if step % 12 == 11:
            weight.assign(npu.distribute.all_reduce([weight])[0])

local_sgd(tf.Variable([1.0, 2.0]))
model = keras.Sequential([keras.Input([6]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
model = npu.distribute.replicate(model)
model.fit(x, x[:, :1], batch_size=12, verbose=0)
later = tf.Variable([1.0, 2.0, 3.0])
npu.distribute.broadcast([later])
local_sgd(later)
model.save("{path}")
npu.distribute.barrier()
other = keras.models.load_model("{path}")
other.fit(x[rank::size], x[rank::size, :1], batch_size=4, epochs=6, verbose=0)
third = keras.models.clone_model(model)
third.set_weights(model.get_weights())
third.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=True)
third.fit(x[rank::size], x[rank::size, :1], batch_size=4, epochs=5, verbose=0)
"""


@pytest.mark.once
def test_a_second_model_that_nobody_replicates(tmp_path: Path, keras: str) -> None:
    together = "".join(
        job.outputs(tmp_path, 2, LOADED.format(path=tmp_path / "half.keras"), keras=keras)
    )
    for name in ("Adam", "SGD"):  # of the loaded model, and of the cloned one, which XLA compiles
        assert together.count(f"{APART}{name} has made ") == 1, together
    assert together.count(APART) == 2 and "such as one loaded or cloned later" in together
    assert together.count("the ranks ended with different values for 4 of ") == 1, together


SESSION = """
import numpy as np
import tensorflow.compat.v1 as tf
import npu_device as npu
from npu_bridge.npu_init import NPUBroadcastGlobalVariablesHook, NPUDistributedOptimizer
npu.compat.enable_v1()
npu.open().as_default()
rank = npu.distribute.rank()
for kind in {kinds}:
    hooks = [] if kind in ("alone", "unequal") else [NPUBroadcastGlobalVariablesHook(0)]
    print("===", kind, flush=True)
    with tf.Graph().as_default():
        tf.set_random_seed(1 + rank)
        x = tf.placeholder(tf.float32, [None, 4])
        hidden = tf.get_variable("hidden", [4, 8], initializer=tf.glorot_uniform_initializer())
        out = tf.get_variable("out", [8, 1], initializer=tf.glorot_uniform_initializer())
        optimizer = tf.train.GradientDescentOptimizer(0.01)
        optimizer = NPUDistributedOptimizer(optimizer) if kind in ("unequal", "broadcast") else optimizer
        loss = tf.reduce_mean((tf.nn.relu(x @ hidden) @ out - 1) ** 2)
        train = optimizer.minimize(loss)
        if kind == "loss only":
            npu.distribute.all_reduce(loss)
        elif kind == "discarded":
            npu.distribute.all_reduce(tf.gradients(loss, [hidden, out]))
        elif kind == "averaged":
            mean = [tf.assign(one, npu.distribute.all_reduce(one.read_value())) for one in (hidden, out)]
        with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
            for _ in range(3):
                session.run(train, {{x: np.random.default_rng(rank).normal(size=(8, 4))}})
print("end", flush=True)
"""
ALONE = (
    "nothing was reduced, broadcast or gathered in this job of 2 ranks: each of them ran by itself"
)


def test_variables_of_sessions_that_begin_differently(tmp_path: Path) -> None:
    kinds = ("unequal", "broadcast", "averaged", "loss only", "discarded")
    outputs = job.outputs(tmp_path, 2, SESSION.format(kinds=kinds))
    unequal, broadcast, *others = map(
        "".join, zip(*(output.split("=== ")[1:] for output in outputs))
    )
    unreduced = "the graph of this session applies gradients of hidden, out that were not reduced"
    assert [text.count(unreduced) for text in (broadcast, *others)] == [0, 0, 1, 1], others
    assert (
        unequal.count("the ranks begin training with different values of 2 of 2 variables (hidden")
        == 1
    )
    assert (
        "NPUBroadcastGlobalVariablesHook(0)" in unequal
        and "rank 1 on host node0: digest" in unequal
    )
    assert "different" not in broadcast and ALONE not in broadcast


KERAS = """
with tf.Graph().as_default():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(8,))])
    model.compile(tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9), "mse")
    model.fit(np.zeros((16, 8)), np.zeros((16, 1)), batch_size=8, verbose=0)
"""


def test_sessions_of_ranks_that_share_nothing(tmp_path: Path) -> None:
    """Keras in a session is left alone."""
    outputs = job.outputs(tmp_path, 2, SESSION.format(kinds=("alone",)) + KERAS, keras="2")
    assert "".join(outputs).count(ALONE) == 1


STATISTICS = """
import gc, logging
import npu_device as npu
npu.open().as_default()
import tensorflow as tf
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
keras, rank = tf.keras, npu.distribute.rank()

def train(model, optimizer, steps, clips=False):
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.random.stateless_normal([4, 4], [rank, 0]), training=True))
        gradients = npu.distribute.all_reduce(tape.gradient(loss, model.trainable_variables))
        if clips:
            gradients, _ = tf.clip_by_global_norm(gradients, 1e-3)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

for steps, clips in ((2, False), (8, True)):  # from different values
    keras.utils.set_random_seed(1 + rank)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(5 + clips), keras.layers.Dense(1)])
    train(model, keras.optimizers.SGD(0.01), steps, clips)
npu.distribute.barrier()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input([4]), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
npu.distribute.broadcast(model.variables)
optimizer = keras.optimizers.Adam(0.01)
train(model, optimizer, 3)
earlier = npu.distribute.npu_distributed_keras_optimizer_wrapper(keras.optimizers.SGD(0.5))
trained = tf.Variable([1.0, 2.0], name="trained")
npu.distribute.broadcast([trained])
earlier.apply_gradients([(tf.ones([3]), tf.Variable([1.0, 2.0, 3.0])), (tf.ones([2]), trained)])
if rank == 1:  # rank 0 keeps it
    del earlier
    gc.collect()
    optimizer.learning_rate.assign(0.5)
    trained.assign([5.0, 6.0])
kind, method = keras.optimizers.Optimizer, "apply" if hasattr(keras, "ops") else "apply_gradients"
watching = getattr(kind, method)
npu.close()
assert getattr(kind, method) is not watching and "keras" in getattr(kind, method).__code__.co_filename
"""


def test_eager_loops_from_different_values_and_the_last_word(tmp_path: Path, keras: str) -> None:
    together = "".join(job.outputs(tmp_path, 2, STATISTICS, keras=keras))
    assert together.count("INFO the ranks ended with different values for 2 of 2 variables") == 1, (
        together
    )
    assert together.count("WARNING the ranks ended with different values for 2 of ") == 1, together
    assert "moving_mean" in together and "learning_rate" in together and "trained:0" in together
    assert (
        together.count("the ranks begin training with different values of 2 of 4 variables (") == 2
    ), together
    assert (
        together.count("call npu.distribute.broadcast(model.variables) before the first step") == 2
    )
