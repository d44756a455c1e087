"""``gradient_accumulation_steps``: N ranks that each add up gradients, and reduce their sum in each update, do what one
process does with the same number of steps.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import warnings_of_package
from combinations import combinations
from fit_models import make_model as make_model_of_fit, samples
from pool import Pool
from rank_comparison import compare, same, same_bits

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device._src.collectives.job import current
from npu_device._src.trace import trace as tracing
from npu_device._src.trace.records import Settings, read

pytestmark = pytest.mark.only_keras("3")

STEPS = 3
TOLERANCE = 5e-6  # of weights of order one after some ten steps, float32
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "momentum": lambda **more: tf.keras.optimizers.SGD(0.1, momentum=0.9, **more),
    "clipped": lambda **more: tf.keras.optimizers.SGD(1.0, global_clipnorm=0.05, **more),
    "scaled": lambda **more: tf.keras.optimizers.SGD(0.1, loss_scale_factor=3.0, **more),
    "averaged": lambda **more: tf.keras.optimizers.AdamW(0.01, use_ema=True, **more),
}
wrap = npu.distribute.DistributedOptimizer


def make_optimizer(kind: str) -> Any:
    return OPTIMIZERS[kind](gradient_accumulation_steps=STEPS)


def make_model() -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input([5]), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    )


def samples_of(step: int, ranks: range) -> tuple[Any, Any]:
    """Return the samples of some ranks in a step: four each."""
    numbers = [np.random.default_rng([step, rank]).standard_normal([4, 5]) for rank in ranks]
    x = np.concatenate(numbers).astype(np.float32)
    return tf.constant(x), tf.constant(3 * x.sum(axis=1, keepdims=True))


def train(model: Any, optimizer: Any, ranks: range, steps: range, graph: bool, by: str) -> None:
    variables = model.trainable_variables

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            loss = loss / npu.distribute.size() if by == "sum" else loss
            loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, variables)
        if by == "lists":
            optimizer.apply(gradients, variables)
        else:
            optimizer.apply_gradients(zip(gradients, variables))

    call = tf.function(step) if graph else step
    for number in steps:
        call(*samples_of(number, ranks))


def outcome(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what is equal on all ranks."""
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    return {
        "weights": model.get_weights(),
        "averages": [variable.numpy() for variable in averages],
        "steps": int(optimizer._iterations),
    }


def body_loop(kind: str, graph: bool, by: str) -> Any:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    model, optimizer = make_model(), make_optimizer(kind)
    wrap(optimizer, "sum" if by == "sum" else "mean")
    train(model, optimizer, range(rank, rank + 1), range(3 * STEPS + 2), graph, by)
    alone, single = make_model(), make_optimizer(kind)
    train(alone, single, range(size), range(3 * STEPS + 2), True, "lists")
    found = outcome(model, optimizer)
    same(found, outcome(alone, single), TOLERANCE)
    assert np.abs(found["weights"][0] - make_model().get_weights()[0]).max() > 0.003
    return found


MODES = ["eager", "function"]
LOOPS = {"momentum": "sum", "clipped": "pairs", "scaled": "lists", "averaged": "pairs"}


@pytest.mark.parametrize(("kind", "mode"), combinations(list(LOOPS), MODES))
def test_a_loop_equals_one_process(keras_ranks: Pool, kind: str, mode: str) -> None:
    same_bits(*keras_ranks.run(body_loop, kind, mode == "function", LOOPS[kind]))


def body_group() -> Any:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    members = range(size - 1) if rank < size - 1 else range(rank, size)
    create_group(f"from_{members[0]}", len(members), list(members))
    try:
        model, optimizer = make_model(), make_optimizer("momentum")
        wrap(optimizer, group=f"from_{members[0]}")
        train(model, optimizer, range(rank, rank + 1), range(2 * STEPS), True, "lists")
        alone, single = make_model(), make_optimizer("momentum")
        train(alone, single, members, range(2 * STEPS), True, "lists")
        same(outcome(model, optimizer), outcome(alone, single), TOLERANCE)
    finally:
        destroy_group(f"from_{members[0]}")
    return members[0], outcome(model, optimizer)


def test_ranks_of_a_group(several_keras_ranks: Pool) -> None:
    outcomes = several_keras_ranks.run(body_group)
    same_bits(*(weights for first, weights in outcomes if first == 0))


def body_dense_and_sparse(graph: bool, dense_steps: tuple[int, ...], table_rows: int) -> Any:
    """Train a table whose gradient is dense in some of the three steps of an update, and has rows in the others."""
    rank, size = npu.distribute.rank(), npu.distribute.size()

    def trained(optimizer: Any, ranks: range) -> Any:
        table = tf.Variable(tf.ones([table_rows, 2]))

        def step(rows: Any, factors: Any, is_dense: bool) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(factors * tf.reduce_sum(tf.square(tf.gather(table, rows)), 1))
            gradient = tape.gradient(loss, table)
            gradient = tf.convert_to_tensor(gradient) if is_dense else gradient
            optimizer.apply_gradients([(gradient, table)])

        call = tf.function(step) if graph else step
        for number in range(2 * STEPS):
            rows = [(number + 2 * each + place) % 6 for each in ranks for place in range(3)]
            factors = [1.0 + 0.1 * number + each for each in ranks for _ in range(3)]
            call(tf.constant(rows), tf.constant(factors), number % STEPS in dense_steps)
        return table.numpy()

    found = trained(wrap(make_optimizer("momentum")), range(rank, rank + 1))
    same(found, trained(make_optimizer("momentum"), range(size)), TOLERANCE)
    return found


# Of 6 rows, a dense sum has fewer bytes than the rows of three steps; of 60 rows, more.
TABLES = [6, 60]


@pytest.mark.parametrize(
    ("dense_steps", "table_rows", "mode"),
    combinations(["0, 1", "1", "2", "1, 2"], TABLES, MODES, usual=3),
)
def test_a_gradient_that_is_dense_in_some_steps(
    several_keras_ranks: Pool, dense_steps: str, table_rows: int, mode: str
) -> None:
    steps = tuple(map(int, dense_steps.split(",")))
    arguments = (mode == "function", steps, table_rows)
    same_bits(*several_keras_ranks.run(body_dense_and_sparse, *arguments))


def make_optimizer_of(kind: str) -> Any:
    keras, name = tf.keras, kind.partition(", ")[0]
    if name == "Keras's loss scale":
        return keras.optimizers.LossScaleOptimizer(make_optimizer("momentum"), initial_scale=8.0)
    if name == "loss scale":
        return npu.train.optimizer.NpuLossScaleOptimizer(make_optimizer("clipped"))
    return make_optimizer(name)


def body_fit(kind: str) -> Any:
    """Two fits of 7 steps an epoch, the last of one sample."""
    model = make_model_of_fit("own step" if "own step" in kind else "functional")
    optimizer = make_optimizer_of(kind)
    model.compile(
        optimizer,
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=2 if "two steps" in kind else 1,
        run_eagerly="eager" in kind,
    )
    model = npu.distribute.replicate(model)
    x, y = samples()
    weights = np.linspace(0.1, 2.0, len(x)) if "weights" in kind else None
    for epochs in (2, 1):
        model.fit(x, y, batch_size=16, sample_weight=weights, epochs=epochs, verbose=0)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    added = [variable.numpy() for variable in inner._accumulated_gradients]
    assert int(inner._iterations) == 21 and not any(each.any() for each in added)
    model.fit(x, y, batch_size=16, sample_weight=weights, epochs=1, verbose=0)
    added = [variable.numpy() for variable in inner._accumulated_gradients]
    assert int(inner._iterations) == 28 and any(each.any() for each in added)
    return {**outcome(model, inner), "added": added}


@pytest.mark.parametrize(
    "kind",
    [
        "momentum, weights",
        pytest.param("clipped, eager", marks=pytest.mark.full),
        pytest.param("averaged, two steps", marks=pytest.mark.full),
        "scaled, own step",
        pytest.param("Keras's loss scale, weights", marks=pytest.mark.full),
        "loss scale, own step",
    ],
)
def test_fit_equals_one_process(several_keras_ranks: Pool, keras_single: Pool, kind: str) -> None:
    compare(several_keras_ranks, keras_single, body_fit, kind)


def body_not_finite(scaling: str, place: str, graph: bool) -> Any:
    """A step whose gradients are infinite on the last rank counts on no rank."""
    rank, size = npu.distribute.rank(), npu.distribute.size()

    def run(ranks: range, reduces: bool) -> Any:
        inner = tf.keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        if reduces and place == "inner":
            wrap(inner)
        kind = (
            tf.keras.optimizers.LossScaleOptimizer
            if scaling == "Keras"
            else npu.train.optimizer.NpuLossScaleOptimizer
        )
        optimizer = kind(inner, initial_scale=8.0)
        if reduces and place == "outer":
            wrap(optimizer)
        variable = tf.Variable([1.0, 2.0])

        def step(factors: Any) -> None:
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(factors) * tf.reduce_sum(variable))
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

        call = tf.function(step) if graph else step
        for number in range(6):
            factors = [number + 1.0 + 2 * other for other in range(size)]
            factors[-1] = np.inf if number in (1, 3) else factors[-1]
            call(tf.constant([factors[other] for other in ranks]))
        return variable.numpy(), int(inner._iterations), float(optimizer.dynamic_scale)

    found = run(range(rank, rank + 1), True)
    same(found, run(range(size), False))
    assert found[1:] == (4, 2.0)
    return found


# Any two values of these occur together.
NOT_FINITE = [
    ("Keras", "inner", "function"),
    ("Keras", "outer", "eager"),
    ("npu", "inner", "eager"),
    ("npu", "outer", "function"),
]
OTHER_MODES = [
    pytest.param(scaling, place, MODES[mode == "eager"], marks=pytest.mark.full)
    for scaling, place, mode in NOT_FINITE
]


@pytest.mark.parametrize(("scaling", "place", "mode"), [*NOT_FINITE, *OTHER_MODES])
def test_steps_that_are_not_finite(keras_ranks: Pool, scaling: str, place: str, mode: str) -> None:
    same_bits(*keras_ranks.run(body_not_finite, scaling, place, mode == "function"))


@contextlib.contextmanager
def traced(directory: str) -> Iterator[None]:
    running = current()
    assert running is not None
    tracing.start(running, Settings(Path(directory)))
    try:
        yield
    finally:
        tracing.stop()


def body_bytes(directory: str, fit: bool) -> Any:
    """Return how many bytes of gradients the ranks have reduced in six steps, as the trace tells."""
    with traced(directory):
        model, optimizer = make_model(), make_optimizer("momentum")
        if fit:
            model.compile(optimizer, "mse")
            x, y = samples_of(0, range(12))
            npu.distribute.replicate(model).fit(x, y, batch_size=8, verbose=0)
        else:
            wrap(optimizer)
            train(model, optimizer, range(1), range(2 * STEPS), True, "lists")
    return sum(int(variable.numpy().nbytes) for variable in model.trainable_variables)


@pytest.mark.parametrize("fit", [False, True], ids=["loop", "fit"])
def test_dense_gradients_are_reduced_once_per_update(
    keras_two_ranks: Pool, fit: bool, tmp_path: Path
) -> None:
    size = keras_two_ranks.run(body_bytes, str(tmp_path), fit)[0]
    for trace in read(tmp_path):
        assert sum(gradient.bytes for gradient in trace.gradients) == size
        assert len(trace.iterations) == 2  # of six steps


def body_table(directory: str, table_rows: int) -> Any:
    with traced(directory):
        return body_dense_and_sparse(True, (), table_rows)


@pytest.mark.parametrize(("table_rows", "reductions"), list(zip(TABLES, (2, 6))))
def test_sparse_gradients_go_the_way_of_fewer_bytes(
    keras_two_ranks: Pool, table_rows: int, reductions: int, tmp_path: Path
) -> None:
    same_bits(*keras_two_ranks.run(body_table, str(tmp_path), table_rows))
    for trace in read(tmp_path):
        assert len(trace.iterations) == reductions  # of six steps


def body_checkpoint(directory: str, begin: int, end: int) -> Any:
    """Train a range of steps in a loop; restore before it, and save after it."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    model, optimizer = make_model(), make_optimizer("momentum")
    wrap(optimizer)
    optimizer.build(model.trainable_variables)
    checkpoint = npu.train.JobCheckpoint(
        directory, model=model, optimizer=optimizer, preemption=False
    )
    with checkpoint:
        assert checkpoint.restore() == begin
        mine = range(rank, rank + 1) if size > 1 else range(2)
        train(model, optimizer, mine, range(begin, end), True, "lists")
        checkpoint.save(end)
        train(model, optimizer, mine, range(end, end + 3), False, "lists")
    assert checkpoint.not_kept == () or size == 1
    return outcome(model, optimizer)


def test_a_checkpoint_between_two_updates(
    keras_two_ranks: Pool, keras_single: Pool, tmp_path: Path
) -> None:
    """Two ranks go on to the same bits, and one with the sum of both."""
    keras_two_ranks.run(body_checkpoint, str(tmp_path / "two"), 0, 5)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    whole = keras_two_ranks.run(body_checkpoint, str(tmp_path / "whole"), 0, 8)
    same_bits(whole[0], *keras_two_ranks.run(body_checkpoint, str(tmp_path / "two"), 5, 8))
    same(keras_single.run(body_checkpoint, str(tmp_path / "one"), 5, 8)[0], whole[0], TOLERANCE)


def body_fit_checkpoint(directory: str, epochs: int, stops: int | None) -> Any:
    model, optimizer = make_model(), make_optimizer("momentum")
    model.compile(optimizer, "mse", metrics=["mae"])
    model = npu.distribute.replicate(model)
    x, y = samples_of(0, range(7))

    class Stop(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(optimizer._iterations) == stops:
                raise InterruptedError

    saved = npu.train.FitCheckpoint(directory, every=5, preemption=False)
    with warnings_of_package() as said, contextlib.suppress(InterruptedError):
        model.fit(x, y, batch_size=7, epochs=epochs, callbacks=[saved, Stop()], verbose=0)
    assert (said == [] and saved.not_kept == ()) or npu.distribute.size() == 1
    return outcome(model, optimizer)


def test_a_fit_goes_on_between_two_updates(
    keras_two_ranks: Pool, keras_single: Pool, tmp_path: Path
) -> None:
    keras_two_ranks.run(body_fit_checkpoint, str(tmp_path / "two"), 3, 6)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    whole = keras_two_ranks.run(body_fit_checkpoint, str(tmp_path / "whole"), 3, None)
    resumed = keras_two_ranks.run(body_fit_checkpoint, str(tmp_path / "two"), 3, None)
    same_bits(whole[0], *resumed)
    alone = keras_single.run(body_fit_checkpoint, str(tmp_path / "one"), 3, None)
    same(alone[0], whole[0], TOLERANCE)


def body_files(directory: str) -> Any:
    """Return what is said of files, and what they hold after an epoch of 7 steps."""
    model, optimizer = make_model(), make_optimizer("momentum")
    model.compile(optimizer, "mse")
    model = npu.distribute.replicate(model)
    x, y = samples_of(0, range(14))
    path = f"{directory}/{npu.distribute.size()}.keras"
    each_epoch = tf.keras.callbacks.ModelCheckpoint(path)
    with warnings_of_package() as said:
        model.fit(x, y, batch_size=8, callbacks=[each_epoch], verbose=0)
        model.save(path.replace(".keras", ".end.keras"))
    assert said == []
    loaded = [tf.keras.models.load_model(each) for each in (path, path.replace(".k", ".end.k"))]
    added = [[each.numpy() for each in one.optimizer._accumulated_gradients] for one in loaded]
    same_bits(*added)
    with warnings_of_package() as said:
        model.train_on_batch(x[:8], y[:8])
        model.save(path)
        if npu.distribute.is_main():
            tf.train.Checkpoint(optimizer=optimizer).write(f"{directory}/own")
    npu.distribute.barrier()
    return {**outcome(model, optimizer), "added": added[0], "said": said}


def test_files_of_rank_0(keras_two_ranks: Pool, keras_single: Pool, tmp_path: Path) -> None:
    [alone] = keras_single.run(body_files, str(tmp_path))
    ranks = keras_two_ranks.run(body_files, str(tmp_path))
    assert [rank.pop("said") for rank in ranks][1:] == [[]] == [alone.pop("said")]
    for rank in ranks:
        same(rank, alone)


def test_a_file_between_two_updates_is_told(keras_two_ranks: Pool, tmp_path: Path) -> None:
    [text] = keras_two_ranks.run(body_files, str(tmp_path))[0]["said"]
    assert "rank 0 writes the state of the optimizer SGD 2 of 3 steps after an update" in text
    assert "makes its next update without them" in text and "What to do: " in text
