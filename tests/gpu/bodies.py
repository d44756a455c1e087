"""The bodies of the GPU tests. Each one also runs on CPUs, on any number of ranks, and on a single device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import npu_device as npu
from hccl.split.api import set_split_strategy_by_size
from npu_device._src.collectives.job import current
from npu_device._src.gradients import split_strategy
from npu_device._src.tf1.config import npu_config_proto
from npu_device._src.trace import trace
from npu_device._src.trace.records import Settings
from npu_device.distribute import hccl_ops
from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

SAMPLES = 24  # divisible by 1, 2 and 3 ranks


def devices() -> dict[str, Any]:
    """Return this rank's device, and where TensorFlow and the handle place things."""
    running = current()
    assert running is not None
    hosts = running.hosts
    rank = running.cluster.rank
    with npu.open().scope():
        scoped = tf.reduce_sum(tf.random.uniform([4, 4])).device
    reduced = npu.distribute.all_reduce(tf.random.uniform([4]), "sum")
    gpus = tf.config.list_physical_devices("GPU")
    config = npu_config_proto(tf.compat.v1.ConfigProto())
    # TensorFlow refuses a session that sees other GPUs.
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        session.run(tf.random.uniform([4]))
    return {
        "numbers": [str(gpus.index(gpu)) for gpu in tf.config.get_visible_devices("GPU")],
        "in sessions": config.gpu_options.visible_device_list,
        "visible": len(tf.config.get_visible_devices("GPU")),
        "logical": len(tf.config.list_logical_devices("GPU")),
        "unit": hosts.devices[rank].unit,
        "names": [device.name for device in hosts.devices],
        "no nccl": hosts.no_nccl,
        "scope": scoped,
        "reduced": float(tf.reduce_sum(reduced)),
        "grows": [
            tf.config.experimental.get_memory_growth(gpu)
            for gpu in tf.config.get_visible_devices("GPU")
        ],
    }


def numbers() -> dict[str, Any]:
    """Reduce lists of all dtypes, dense and sparse, on the device and in host memory, eagerly and in a function."""
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num
    kinds = (tf.float32, tf.int32, tf.float16, tf.bfloat16, tf.float64, tf.int64, tf.uint8)
    with handle.scope():
        values: list[Any] = [tf.cast(tf.range(1, 6) * (rank + 1), kind) for kind in kinds]
    with tf.device("CPU:0"):
        values.append(tf.range(3.0) + rank)
        rows = tf.IndexedSlices(
            tf.ones([2, 3]) * (rank + 1.0), tf.constant([0, 5]), tf.constant([50, 3])
        )

    def reduce(values: list[Any], rows: Any) -> list[Any]:
        mean = npu.distribute.all_reduce([*values, None, rows], "mean")
        largest = npu.distribute.all_reduce(values, "max")
        gathered = hccl_ops.allgather(values[0], size)
        from_last = hccl_ops.broadcast([values[0], values[1]], size - 1)
        compressed = npu.distribute.all_reduce(values[0] / 3.0, "sum")
        dense = [
            tf.cast(value, tf.float64)
            for value in (*mean[:-2], *largest, gathered, *from_last, compressed)
        ]
        return [*dense, tf.cast(tf.convert_to_tensor(mean[-1]), tf.float64)]

    def as_lists(results: list[Any]) -> list[Any]:
        return [result.numpy().tolist() for result in results]

    function = tf.function(reduce)
    return {
        "eager": as_lists(reduce(values, rows)),
        "function": as_lists(function(values, rows)),
        "again": as_lists(function(values, rows)),
    }


def expected_numbers(size: int) -> list[Any]:
    """Return the results of ``numbers``, computed in NumPy."""
    base, ranks = np.arange(1, 6), np.arange(1, size + 1)
    mean, largest = base * ranks.mean(), base * size  # a mean of integers is floating-point
    cpu = np.arange(3.0) + (size - 1) / 2
    rows = np.zeros([50, 3])
    rows[[0, 5]] = ranks.mean()
    return [
        *[mean] * 7,
        cpu,
        *[largest] * 7,
        np.arange(3.0) + size - 1,
        np.concatenate([base * rank for rank in ranks]),
        base * size,
        base * size,
        base * ranks.sum() / 3,
        rows,
    ]


def _model(keras: Any) -> Any:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(32, activation="tanh")]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1, dtype="float32")])


def _data(rank: int, size: int) -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    x, y = (
        random.normal(size=(SAMPLES, 8)).astype("float32"),
        random.normal(size=(SAMPLES, 1)).astype("float32"),
    )
    share = SAMPLES // size
    return x[rank * share : (rank + 1) * share], y[rank * share : (rank + 1) * share]


def loop(steps: int, segments: int, compiled: bool) -> list[float]:
    """Train in a custom loop on this rank's part of the data; return the sums of the weights."""
    handle = npu.open()
    model, optimizer = _model(tf.keras), tf.keras.optimizers.SGD(0.1, momentum=0.9)
    npu.distribute.broadcast(model.variables)
    x, y = _data(handle.worker_id, handle.workers_num)
    split_strategy.forget_strategies()
    if segments > 1:
        set_split_strategy_by_size([100 / segments] * segments)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        reduced = npu.distribute.all_reduce(gradients, "mean")
        optimizer.apply_gradients(zip(reduced, model.trainable_variables))

    made = tf.function(step) if compiled else step
    for _ in range(steps):
        made()
    split_strategy.forget_strategies()
    return [float(tf.reduce_sum(weights)) for weights in model.trainable_variables]


def fit(mixed: bool, replicate: bool) -> list[float]:
    """Train with ``fit``; return the losses and the sums of the weights."""
    handle = npu.open()
    tf.keras.mixed_precision.set_global_policy("mixed_float16" if mixed else "float32")
    try:
        model, optimizer = _model(tf.keras), tf.keras.optimizers.SGD(0.1)
        if replicate:
            npu.distribute.replicate(model)
        else:
            optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(
                optimizer, reduce_reduction="mean"
            )
        model.compile(optimizer=optimizer, loss="mse")
        x, y = _data(0, 1) if replicate else _data(handle.worker_id, handle.workers_num)
        callbacks = [NPUBroadcastGlobalVariablesCallback(0)]
        history = model.fit(
            x, y, batch_size=len(x), epochs=4, shuffle=False, verbose=0, callbacks=callbacks
        )
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    losses = (
        history.history["loss"] if replicate else []
    )  # without replicate, each rank has its own
    return [
        *losses,
        *(float(tf.reduce_sum(tf.cast(w, tf.float32))) for w in model.trainable_variables),
    ]


def divided_fit(directory: str) -> tuple[list[float], list[float]]:
    """Train with divided updates, and save; return the sums of the weights, and on rank 0 those of the saved slots."""
    handle = npu.open()
    model = npu.distribute.replicate(_model(tf.keras), shard_optimizer=True)
    model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    x, y = _data(0, 1)
    model.fit(x, y, batch_size=len(x), epochs=4, shuffle=False, verbose=0)
    weights = [float(tf.reduce_sum(weight)) for weight in model.trainable_variables]
    if handle.worker_id:
        return weights, []
    path = Path(directory) / "model.keras"
    model.save(path)
    saved = tf.keras.models.load_model(path).optimizer.variables
    if callable(saved):  # Keras 2
        saved = saved()
    return weights, sorted(float(tf.reduce_sum(tf.cast(slot, tf.float32))) for slot in saved)


def _step(weights: list[Any], x: Any) -> Any:
    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean(value**2)
        for weight, gradient in zip(
            weights, npu.distribute.all_reduce(tape.gradient(loss, weights), "mean")
        ):
            weight.assign_sub(0.01 * gradient)

    return step


def traced_loop(directory: str) -> None:
    """Train with four segments while a trace runs."""
    running = current()
    assert running is not None
    set_split_strategy_by_size([25] * 4)
    trace.start(running, Settings(Path(directory)))
    width = 4096 if tf.config.get_visible_devices("GPU") else 512  # backward has to take a while
    weights = [
        tf.Variable(tf.random.stateless_normal([width, width], (1, i)) / width) for i in range(12)
    ]
    npu.distribute.broadcast(weights)
    step = _step(weights, tf.ones([64, width]))
    for _ in range(10):
        step()
    trace.stop()
    split_strategy.forget_strategies()


def memory(steps: int) -> dict[str, float]:
    """Train for many steps; return by how many MB host and GPU memory grew after the first fifth."""
    weights = [tf.Variable(tf.ones([64, 64]) / 64) for _ in range(4)]
    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    step = _step(weights, tf.ones([8, 64]))

    def used() -> tuple[float, float]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        gpu = tf.config.experimental.get_memory_info("GPU:0")["current"] if on_gpu else 0
        return pages * 4096 / 1e6, gpu / 1e6

    for _ in range(steps // 5):
        step()
    before = used()
    for _ in range(steps - steps // 5):
        step()
    after = used()
    return {"host": after[0] - before[0], "gpu": after[1] - before[1]}
