"""Horovod's names: unchanged scripts of Horovod train as Horovod's documentation says, under either Keras."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
from caught_messages import hears, warnings_of_package
from launcher import environment, npurun, script
from mpi_ranks import mpiexec
from pool import Pool
from ranks import all_through

PASSES = 3


def body_operations() -> None:
    import tensorflow as tf

    import npu_device.horovod.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2
    mine = tf.fill([2, 3], rank + 1)
    assert hvd.allreduce(mine, op=hvd.Sum).numpy().tolist() == [[total] * 3] * 2
    assert hvd.allreduce(mine, average=False).dtype == tf.int32
    assert hvd.allreduce(float(rank)).numpy() == (size - 1) / 2
    assert hvd.allreduce(mine, op=hvd.Product).numpy()[0, 0] == np.prod(range(1, size + 1))
    sums = hvd.grouped_allreduce(
        [mine, tf.ones([])], op=hvd.Sum, prescale_factor=2.0, compression=hvd.Compression.fp16
    )
    assert sums[0].numpy()[0, 0] == 2 * total and sums[1].numpy() == 2 * size
    slices = tf.IndexedSlices(tf.fill([1, 2], float(rank)), tf.constant([0]), tf.constant([4, 2]))
    np.testing.assert_allclose(
        hvd.allreduce(slices).values.numpy()[:, 0], np.arange(size) / size, rtol=1e-6
    )
    gathered = hvd.allgather(tf.fill([rank], rank)).numpy().tolist()
    assert gathered == [other for other in range(size) for _ in range(other)]
    assert hvd.broadcast(tf.constant(rank), root_rank=size - 1).numpy() == size - 1
    sent, counts = hvd.alltoall(tf.fill([size * 2, 2], rank), splits=[2] * size)
    assert sent.numpy()[:, 0].tolist() == [r for r in range(size) for _ in range(2)]
    assert counts.numpy().tolist() == [2] * size
    exchange = tf.function(hvd.alltoall, input_signature=[tf.TensorSpec([None], tf.int32)])
    assert exchange(tf.range(2 * size)).numpy().tolist() == [2 * rank, 2 * rank + 1] * size
    if size > 1:
        with pytest.raises(tf.errors.InvalidArgumentError, match="pass splits"):
            exchange(tf.range(2 * size + 1))
    rows = (
        hvd.reducescatter(tf.range(size + 1), op=hvd.Sum).numpy().tolist()
    )  # one row more for rank 0
    assert rows == (
        [0, size] if rank == 0 and size > 1 else [0, 1] if size == 1 else [rank * size + size]
    )
    assert hvd.allgather_object(rank) == list(range(size))
    assert hvd.broadcast_object_fn(0)({"rank": rank}) == {"rank": 0}
    layer = hvd.SyncBatchNormalization(momentum=0.0, epsilon=0.0)
    out = layer(tf.fill([2, 1], float(rank)), training=True)
    np.testing.assert_allclose(layer.moving_mean, [(size - 1) / 2], rtol=1e-6)
    assert size == 1 or abs(float(hvd.allreduce(out[0, 0]))) < 1e-5
    callback = importlib.import_module(
        "npu_device.horovod.keras"
    ).callbacks.BroadcastGlobalVariablesCallback
    for wrong in (
        lambda: hvd.allreduce(mine, op=hvd.Adasum),
        lambda: hvd.allgather(mine, process_set=1),
        lambda: callback(0, device="", local_variables=[mine]),
    ):
        with pytest.raises(NotImplementedError, match="What to do"):
            wrong()
    if size > 1:
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1"):
            hvd.allreduce(tf.zeros([1 + rank]))
    assert (
        not hasattr(hvd, "join")
        and not hasattr(hvd, "ProcessSet")
        and hasattr(hvd, "SyncBatchNormalization")
    )


def test_operations_of_horovod_give_its_results(keras_ranks: Pool) -> None:
    keras_ranks.run(body_operations)


def body_accumulate(graph: bool, dense: bool, scaled: bool) -> Any:
    import tensorflow as tf

    import npu_device.horovod.tensorflow.keras as hvd

    hvd.init()
    weight = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    optimizer = outer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.1),
        op=hvd.Sum if scaled else hvd.Average,
        backward_passes_per_step=PASSES,
        sparse_as_dense=dense,
    )
    if scaled:
        outer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1.0)

    def step(number: Any) -> None:
        with tf.GradientTape() as tape:
            used = tf.gather(weight, [0, 0, 2]) if dense else weight
            loss = tf.reduce_sum(used) * tf.cast(number + hvd.rank(), tf.float32)
        outer.apply_gradients([(tape.gradient(loss, weight), weight)])

    call = tf.function(step) if graph else step
    for number in range(2 * PASSES + 1):
        call(tf.constant(number))
    assert int(np.asarray(optimizer.iterations)) == 2 * PASSES + 1
    return weight.numpy(), float(np.asarray(optimizer.lr)), len(optimizer.variables())


@pytest.mark.parametrize(
    ("graph", "dense", "scaled"),
    [(True, False, False), (False, False, True), (True, True, False), (True, False, True)],
)
def test_gradients_of_several_batches(
    keras_ranks: Pool, graph: bool, dense: bool, scaled: bool
) -> None:
    batches, size = range(2 * PASSES), keras_ranks.size
    gradient = sum(batches) + len(batches) * (size - 1) / 2
    if scaled:
        gradient *= size
    rows = np.array([[2.0], [0.0], [1.0]] if dense else [[1.0]] * 3)
    expected = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) - 0.1 * gradient * rows
    for weight, rate, _ in keras_ranks.run(body_accumulate, graph, dense, scaled):
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
        assert rate == pytest.approx(0.1)


def body_between_updates(directory: str, begin: int, end: int, op: str) -> Any:
    """Train a range of batches after restoring, and save after it; on one rank with the mean of two ranks."""
    import tensorflow as tf

    import npu_device as npu
    import npu_device.horovod.tensorflow.keras as hvd

    hvd.init()
    weight = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=PASSES,
        op=getattr(hvd, op),
    )
    optimizer.build([weight])

    @tf.function
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2) * factor
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    own = hvd.rank() if hvd.size() > 1 else 0.5
    times = 2.0 if hvd.size() == 1 and op == "Sum" else 1.0
    with npu.train.JobCheckpoint(
        directory, weight=weight, optimizer=optimizer, preemption=False
    ) as checkpoint:
        assert checkpoint.restore() == begin
        for number in range(begin, end + 2):
            if number == end:
                checkpoint.save(end)
            step(tf.constant(times * (number + own) / 50))
    with warnings_of_package() as said:
        tf.train.Checkpoint(optimizer=optimizer).write(f"{directory}/{hvd.rank()}")
    return weight.numpy(), said


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_a_checkpoint_between_two_updates(
    keras_two_ranks: Pool, keras_single: Pool, tmp_path: Path, op: str
) -> None:
    keras_two_ranks.run(body_between_updates, str(tmp_path / "two"), 0, 5, op)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    whole = keras_two_ranks.run(body_between_updates, str(tmp_path / "whole"), 0, 8, op)
    parts = keras_two_ranks.run(body_between_updates, str(tmp_path / "two"), 5, 8, op)
    for weight, said in parts:
        assert weight.tolist() == whole[0][0].tolist()
        assert "1 of 3 steps after an update" in said[0]
    [(alone, _)] = keras_single.run(body_between_updates, str(tmp_path / "one"), 5, 8, op)
    np.testing.assert_allclose(alone, whole[0][0], rtol=1e-6)


def body_loop(kind: str) -> Any:
    """The loop of Horovod's documentation, which sends the variables after the first step: that is no cause to warn."""
    import logging

    import tensorflow as tf

    import npu_device.horovod.tensorflow as hvd

    hvd.init()
    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.01)
    if "optimizer" in kind:
        optimizer = hvd.DistributedOptimizer(optimizer)
    records: list[Any] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npu_device").addHandler(handler)

    def step(x: Any, first: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
            if "optimizer" not in kind:
                # Within the block of the tape that records, which ends with it.
                tape = hvd.DistributedGradientTape(tape)  # noqa: PLW2901 - what is tested
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if "function" in kind:
            # A branch returns the call, as scripts for graphs do.
            variables = model.variables + list(optimizer.variables)
            send = lambda: hvd.broadcast_variables(variables, root_rank=0)  # noqa: E731
            tf.cond(first, send, lambda: tf.constant(True))
        elif first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)

    if "function" in kind:
        step = tf.function(step)
    for number in range(8):
        step(tf.random.normal([8, 4]), tf.constant(number == 0))
    logging.getLogger("npu_device").removeHandler(handler)
    assert not records, records
    return [value.tolist() for value in model.get_weights()]


def body_numbers_as_tensors(graph: bool) -> Any:
    """The numbers of the job, and variables, in a function or in eager mode."""
    import tensorflow as tf

    import npu_device.horovod.tensorflow as hvd

    hvd.init()
    variables = [tf.Variable([1.0 * hvd.rank()]), tf.Variable(hvd.rank())]

    def numbers() -> Any:
        assert hvd.util._executing_eagerly() == hvd._executing_eagerly() != graph
        found = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(name="local"), hvd.local_size_op()]
        return found, hvd.broadcast_(variables, root_rank=hvd.size() - 1)

    found, sent = (tf.function(numbers) if graph else numbers)()
    with pytest.raises(NotImplementedError, match="process sets"):
        hvd.size_op(process_set_id=1)
    assert [variable.numpy().tolist() for variable in variables] == [
        one.numpy().tolist() for one in sent
    ]
    return [int(one) for one in found], [float(tf.squeeze(one)) for one in sent]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_rank_and_size_are_tensors_in_graphs(keras_ranks: Pool, graph: bool) -> None:
    size = keras_ranks.size
    for rank, found in enumerate(keras_ranks.run(body_numbers_as_tensors, graph)):
        assert found == ([rank, size, rank, size], [size - 1.0] * 2)


@hears
def body_local_sources(said: list[str], graph: bool, scales: bool) -> Any:
    """A layer that each rank trains by itself, and a table with rows; return the gradients."""
    import tensorflow as tf

    import npu_device.horovod.tensorflow as hvd

    hvd.init()
    rank = hvd.rank()
    own, common = (
        tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)
    )
    table = tf.keras.layers.Embedding(
        2, 1, embeddings_initializer=tf.keras.initializers.Constant(rank)
    )
    for layer, value in ((own, 1.0), (common, 1.0), (table, 1)):
        layer(tf.constant([[value]]))
    optimizer = tf.keras.optimizers.SGD(0.1)

    def step(factor: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            rows = table(tf.constant([1])) * factor
            loss = tf.reduce_sum(common(own(tf.reshape(factor, [1, 1])))) + tf.reduce_sum(rows)
        sources = [layer.trainable_variables[0] for layer in (own, common, table)]
        tape = hvd.PartialDistributedGradientTape(
            tape, local_layers=[own], scale_local_gradients=scales
        )
        tape.register_local_source(sources[2])
        local, others = tape.get_local_and_global_gradients(loss, sources)
        assert [
            pair[0] is source
            for pair, source in zip([*local, *others], [sources[0], sources[2], sources[1]])
        ]
        optimizer.apply_gradients(
            [(gradient, variable) for variable, gradient in [*local, *others]]
        )
        gradients = tape.gradient(loss, sources)
        return gradients[:2], gradients[2].values

    call = tf.function(step) if graph else step
    first, *_ = [call(tf.constant(rank + 1.0)) for _ in range(8)]
    with pytest.raises(ValueError, match="expected layers of Keras"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["table"])
    assert not said, said
    return [np.asarray(one).ravel().tolist() for one in tf.nest.flatten(first)]


@pytest.mark.parametrize(("graph", "scales"), [(False, True), (True, False)])
def test_gradients_of_local_variables_stay_on_their_rank(
    keras_ranks: Pool, graph: bool, scales: bool
) -> None:
    size = keras_ranks.size
    mean = (size + 1) / 2
    for rank, found in enumerate(keras_ranks.run(body_local_sources, graph, scales)):
        share = (rank + 1.0) / (size if scales else 1)
        np.testing.assert_allclose(found, [[share], [mean], [share]], rtol=1e-6)


@pytest.mark.parametrize("kind", ["function", "eager", "function, optimizer", "eager, optimizer"])
def test_loops_with_horovods_names_train_all_ranks_alike(keras_ranks: Pool, kind: str) -> None:
    weights = keras_ranks.run(body_loop, kind)
    assert all(other == weights[0] for other in weights)


UNKNOWN_ROWS = """
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
import npu_device.horovod.tensorflow as hvd

hvd.init()
rows, splits = tf.placeholder(tf.int32, [None, 2]), tf.placeholder(tf.int32, [None])
halves = hvd.alltoall(rows)
fetches = [hvd.reducescatter(rows, op=hvd.Sum), halves, *hvd.alltoall(rows, splits)]
four = [[row, row] for row in range(4)]
with tf.Session() as session:
    print([fetched.tolist() for fetched in session.run(fetches, {rows: four, splits: [1, 2]})])
    try:
        session.run(halves, {rows: four[1:]})
    except tf.errors.InvalidArgumentError as error:
        print("pass splits" in str(error))
"""


def test_unknown_rows_in_a_session_with_the_shapes_of_tensorflow_1(tmp_path: Path) -> None:
    """Unknown dimensions are objects there."""
    first, second = job.outputs(tmp_path, 2, UNKNOWN_ROWS)
    zeros = [[0, 0]]
    assert f"{[[[0, 0], [2, 2]], [*zeros, [1, 1]] * 2, zeros * 2, [1, 1]]}\nTrue" in first
    assert f"{[[[4, 4], [6, 6]], [[2, 2], [3, 3]] * 2, [[1, 1], [2, 2]] * 2, [2, 2]]}\n" in second


def body_session() -> Any:
    import tensorflow as tf

    import npu_device.horovod.tensorflow as hvd

    hvd.init()
    with tf.Graph().as_default():
        weight = tf.compat.v1.get_variable(
            "w", initializer=float(hvd.rank() + 1), use_resource=True
        )
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(weight * float(hvd.rank() + 1))
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            session.run(train)
            end = float(session.run(weight))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        mine = tf.ones([hvd.size()])
        moved = (
            hvd.allgather(mine),
            hvd.broadcast(mine, root_rank=0),
            hvd.alltoall(mine),
            hvd.reducescatter(mine),
            hvd.reducescatter(mine, op=hvd.Sum),
        )
        scale = float(hvd.rank() + 1)
        gradients = [
            found.tolist()
            for found in session.run([tf.gradients(one * scale, mine)[0] for one in moved])
        ]
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"rank 1[\s\S]*What to do"):
            session.run(hvd.allreduce(tf.zeros([1 + hvd.rank()])))
        with pytest.raises(tf.errors.FailedPreconditionError, match="alltoall of 1 tensor"):
            session.run(hvd.alltoall(tf.zeros([6, 1 + hvd.rank()])))
        with pytest.raises(tf.errors.InvalidArgumentError, match="pass splits"):
            hvd.alltoall(tf.zeros([7 * hvd.size() + 1]))
    return end, gradients


def test_gradients_in_sessions_are_the_same_as_in_horovod(several_ranks: Pool) -> None:
    """Gradients are those of Horovod, also of what Ascend doesn't differentiate."""
    size = several_ranks.size
    mean, numbers = (size + 1) / 2, [float(rank + 1) for rank in range(size)]
    for rank, (end, gradients) in enumerate(several_ranks.run(body_session)):
        assert end == pytest.approx(1 - 0.5 * mean)
        sent = [mean if rank == 0 else 0.0] * size
        assert gradients == [[mean] * size, sent, numbers, numbers, [size * one for one in numbers]]


def body_callbacks(graph: bool) -> Any:
    import tensorflow as tf

    import npu_device.distribute
    import npu_device.horovod.tensorflow.keras as hvd

    class PerClass(tf.keras.metrics.MeanSquaredError):
        def result(self) -> Any:
            return super().result() * tf.constant([1.0, 2.0])

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    with tf.Graph().as_default() if graph else contextlib.nullcontext():
        tf.keras.utils.set_random_seed(rank)
        optimizers = tf.keras.optimizers.legacy if graph else tf.keras.optimizers
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
        metrics: list = ["mae"]
        if not graph:
            metrics.append(PerClass(name="per_class"))
        # Only the root's rate counts, as if it alone had loaded the model.
        rate = 0.1 * size if rank == 0 else 5.0
        model.compile(hvd.DistributedOptimizer(optimizers.SGD(rate)), "mse", metrics=metrics)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(device=""),
            hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(None, lambda epoch: 0.1, start_epoch=2),
        ]
        x = np.random.default_rng(rank).normal(size=(16, 3)).astype(np.float32)
        found = model.fit(x, x[:, :1] + rank, 8, epochs=3, verbose=0, callbacks=callbacks).history
        weights = [value.tolist() for value in model.get_weights()]
        if size > 1 and not graph:
            with pytest.raises(ValueError, match="take out the hvd calls"):
                npu_device.distribute.replicate(model).fit(x, x[:, :1], 8, verbose=0)
        return {name: np.array(one).tolist() for name, one in found.items()}, weights


def require_equal_ends(ranks: Pool, graph: bool) -> None:
    ends, size = ranks.run(body_callbacks, graph), ranks.size
    assert all(end == ends[0] for end in ends)
    if not graph:
        losses = np.array(ends[0][0]["loss"])
        np.testing.assert_allclose(ends[0][0]["per_class"], losses[:, None] * [1, 2], rtol=1e-5)
    assert ends[0][0]["lr"] == pytest.approx([0.1 * (1 + (size - 1) / 2), 0.1 * size, 0.01 * size])


def test_callbacks_leave_equal_metrics_weights_and_rates(keras_ranks: Pool) -> None:
    require_equal_ends(keras_ranks, False)


def test_callbacks_on_one_rank(single: Pool) -> None:
    require_equal_ends(single, False)


@pytest.mark.only_keras("2")
def test_callbacks_do_so_in_a_graph(keras_two_ranks: Pool) -> None:
    require_equal_ends(keras_two_ranks, True)


TRAIN = """
    import sys
    import horovod
    import horovod.tensorflow.keras as hvd
    import npu_device.horovod.tensorflow.keras as ours
    import numpy as np
    import tensorflow as tf

    assert hvd is ours and horovod.__version__ and hvd.__spec__.name == "npu_device.horovod.tensorflow.keras"
    hvd.init()
    random = np.random.default_rng(hvd.rank())
    model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
    rate = 0.1 * hvd.size()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(rate))
    model.compile(optimizer, "mse", experimental_run_tf_function=False)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=1),
    ]
    found = model.fit(
        random.normal(size=(32, 3)), random.normal(size=(32, 2)), 8, epochs=2, verbose=0, callbacks=callbacks
    )
    assert np.allclose(found.history["lr"], [0.1 * (1 + (hvd.size() - 1) / 2), rate]), found.history
    everybody = hvd.allgather_object([found.history, [value.tolist() for value in model.get_weights()]])
    assert all(other == everybody[0] for other in everybody)
    if hvd.rank() == 0:
        model.save("model.keras")
    hvd.allgather_object(0)
    loaded = hvd.load_model("model.keras")
    assert np.isclose(float(np.asarray(loaded.optimizer.lr)), rate)
    print("trained", hvd.size())
"""


@pytest.mark.slow
def test_an_unchanged_script_trains_and_writes_a_timeline(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    variables = {"HOROVOD_TIMELINE": str(tmp_path / "timeline.json"), "HOROVOD_CYCLE_TIME": "1"}
    command = ["--horovod", "-np", "2", "sh", "-c", f"{sys.executable} {path}"]
    done = npurun(*command, cwd=tmp_path, limit=120, TF_USE_LEGACY_KERAS="0", **variables)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("trained 2") == 2
    assert done.stdout.decode().count("finished gradual learning rate warmup to 0.2") == 1
    assert done.stderr.decode().count("HOROVOD_CYCLE_TIME: no effect") == 1
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


PINNING = """
import tensorflow as tf
import npu_device.horovod.tensorflow as hvd
hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
print("sum", float(hvd.allreduce(1.0, op=hvd.Sum)), flush=True)
"""
# TensorFlow lists GPUs that aren't there.
TWO_GPUS = """
from npu_device._src import compat
context = compat.eager_context()
context._initialize_physical_devices()
for number in range(2):
    gpu = type(context._physical_devices[0])(f"/physical_device:GPU:{number}", "GPU")
    context._physical_devices.append(gpu)
    context._visible_device_list.append(gpu)
    context._memory_growth_map[gpu] = None
"""


def test_lines_that_pin_a_gpu_stay(tmp_path: Path) -> None:
    for result in job.run(tmp_path, 2, TWO_GPUS + PINNING, **all_through("tensorflow")):
        assert result.code == 0 and "sum 2.0" in result.output, result.output


WITHOUT_TENSORFLOW = """
    import sys
    import horovod
    assert horovod.__version__ and not hasattr(horovod, "join") and "tensorflow" not in sys.modules
    for name in ("horovod.torch", "horovod.common", "npu_device.horovod.mxnet"):
        try:
            __import__(name)
        except ImportError as error:
            print(error)
"""
IMPORTED_NAMES = """
    for line in (
        "from horovod.tensorflow import elastic",
        "import horovod.tensorflow.keras.elastic",
        "from horovod.keras import BestModelCheckpoint",
        "from horovod.keras import misspelt",
    ):
        try:
            exec(line)
        except ImportError as error:
            print(error, end="; ")
"""


def test_module_that_runs_a_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "npu_device.horovod", script(tmp_path, WITHOUT_TENSORFLOW)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("npu_device has no")] == [
        "npu_device has no horovod.torch.",
        "npu_device has no horovod.common.",
        "npu_device has no horovod.mxnet.",
    ]
    assert "torchrun" in done.stdout and "npurun docs from_horovod" in done.stdout


def test_imports_of_names_that_are_not_offered_have_a_remedy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "npu_device.horovod", script(tmp_path, IMPORTED_NAMES)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    elastic = "npurun --max-restarts with npu.train.FitCheckpoint"
    _, first, second, third = done.stdout.split("npu_device has no ")
    assert first.startswith("horovod.tensorflow.elastic.\n") and elastic in first
    assert second.startswith("horovod.tensorflow.keras.elastic.\n") and elastic in second
    assert third.startswith("horovod.keras.BestModelCheckpoint.\n") and "save_best_only" in third
    assert "cannot import name 'misspelt'" in third


@pytest.mark.slow
def test_mpiexec_starts_ranks_of_horovod(tmp_path: Path) -> None:
    text = """
        import os
        import horovod.tensorflow as hvd
        hvd.init()
        os.write(1, f"{hvd.rank()} {hvd.allgather_object(hvd.rank())}\\n".encode())  # in one piece
        """
    command = [
        *mpiexec("MPICH"),
        "-n",
        "2",
        sys.executable,
        "-m",
        "npu_device.horovod",
        script(tmp_path, text),
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert sorted(done.stdout.splitlines()) == ["0 [0, 1]", "1 [0, 1]"], done.stderr


def test_a_script_without_the_option(tmp_path: Path) -> None:
    done = npurun("-n", "1", script(tmp_path, "import horovod.tensorflow as hvd"), cwd=tmp_path)
    assert done.returncode == 1 and "What to do: npurun --horovod" in done.stderr.decode()


def test_horovods_launcher_is_refused(tmp_path: Path) -> None:
    text = "import npu_device.horovod.tensorflow as hvd; hvd.init()"
    [ended] = job.run(tmp_path, 1, text, HOROVOD_SIZE="2", HOROVOD_RANK="0")
    assert ended.code == 1 and "npurun" in ended.output
