"""Gradients are cut, in the order of their production, into segments that travel while backward still runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of
from pool import Pool

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
from npu_device._src.collectives.engines.host.host_engine import end_of
from npu_device._src.collectives.graph import origin
from npu_device._src.collectives.job import current
from npu_device._src.gradients import split_strategy
from npu_device._src.gradients.segments import production_order

WIDTH = 512


pytestmark = pytest.mark.both_engines


def _segment_sizes(function: Any) -> list[int]:
    """Elements of each all-reduce in a traced function, in the order of the graph."""
    sizes = []
    for op in function.get_concrete_function().graph.get_operations():
        # TensorFlow's kernel takes one vector; shared memory's start three inputs of its own and the tensors.
        tensors = op.inputs[:1] if op.type == "CollectiveReduceV2" else op.inputs[3:]
        if op.type in ("CollectiveReduceV2", "PyFuncStateless") and tensors:
            # Of unknown length is what has room for later calls with the same fusion_id.
            sizes.append(sum(tensor.shape.num_elements() or 0 for tensor in tensors))
    return sizes


def body_strategies() -> Any:
    weights = [tf.Variable(tf.ones([2, 2]) * 0.1) for _ in range(10)]

    def trace(**arguments: Any) -> list[int]:
        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                x = tf.ones([1, 2])
                for weight in weights:
                    x = tf.tanh(x @ weight)
            return npu.distribute.all_reduce(tape.gradient(x, weights), "sum", **arguments)

        return _segment_sizes(step)

    found = {}
    try:
        found["default"] = trace()
        set_split_strategy_by_idx([1, 4, 9])
        found["by index"] = trace()
        set_split_strategy_by_size([60, 20, 20])
        found["by size"] = trace()
        found["alone"] = trace(fusion=0)
        found["one"] = trace(fusion=2, fusion_id=3)
        split_strategy.forget_strategies()
        set_split_strategy_by_idx([1, 8])
        found["error"] = error_of(trace)
    finally:
        split_strategy.forget_strategies()
    return found


def body_one_rank_retraces() -> list[float]:
    weights = [tf.Variable(tf.ones([4, 4]) * 0.1) for _ in range(2)]

    @tf.function(reduce_retracing=True)
    def branches(x: Any) -> Any:
        with tf.GradientTape() as tape:
            one, other = x @ weights[0], x @ weights[1]
            for _ in range(6):
                one = one * x  # whose gradient takes more operations if the batch size is unknown
            for _ in range(12):
                other = tf.tanh(other)
            loss = tf.reduce_sum(one) + tf.reduce_sum(other)
        return npu.distribute.all_reduce(tape.gradient(loss, weights), "sum")

    rank = npu.open().worker_id
    return [float(tf.reduce_sum(branches(tf.ones([rows, 4]))[0])) for rows in (8, 8 - (rank > 0))]


def test_one_rank_alone_may_retrace_with_an_unknown_batch_size(ranks: Pool) -> None:
    first, *others = ranks.run(body_one_rank_retraces)
    assert all(each == first for each in others)


@pytest.mark.more_engines("tcp", "mpi")
def test_the_strategy_cuts_the_list(several_ranks: Pool) -> None:
    for found in several_ranks.run(body_strategies):
        assert found["default"] == [
            40
        ]  # ten equal gradients: 96.54 % is all of them but less than one
        assert found["by index"] == [8, 12, 20]
        assert found["by size"] == [24, 8, 8]
        assert found["alone"] == [4] * 10
        assert len(found["one"]) == 1
        assert "9" in found["error"] and "8" in found["error"]


def body_times(overlap: bool, cores: int) -> Any:
    weights = [tf.Variable(tf.eye(WIDTH)) for _ in range(12)]
    times: dict[str, list[float]] = {"first reduced": [], "last made": []}

    def note(name: str, tensor: Any) -> Any:
        def now(_: Any, ended: Any) -> Any:
            times[name].append(float(ended) or time.time())
            return np.float32(0)

        # In shared memory a reduction is over before its result is asked for.
        ended = end_of(origin(tensor).op)
        # Not stateful: TensorFlow would run these one after the other in the order of the script.
        inputs = [tensor[0, 0], tf.constant(0.0) if ended is None else ended]
        return tf.numpy_function(now, inputs, tf.float32, stateful=False)

    running = current()
    real, running.cores = running.cores, cores
    create_group("overlapping", npu.distribute.size(), list(range(npu.distribute.size())))
    set_split_strategy_by_idx([0, len(weights) - 1], "overlapping")
    npu.global_options().hcom_parallel = overlap
    try:

        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                y = x
                for weight in weights:
                    y = tf.tanh(y @ weight)
            gradients = tape.gradient(y, weights)
            reduced = npu.distribute.all_reduce(gradients, "sum", group="overlapping")
            return note("first reduced", reduced[-1]), note("last made", gradients[0])

        for _ in range(6):
            step(tf.ones([1024, WIDTH]))
    finally:
        npu.global_options().hcom_parallel = True
        split_strategy.forget_strategies()
        destroy_group("overlapping")
        running.cores = real
    return [first - last for first, last in zip(times["first reduced"], times["last made"])][1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "cores"),
    [(True, 2), (False, 2), (True, 1)],
    ids=["hcom_parallel", "without", "on one core"],
)
def test_the_first_segment_arrives_before_the_last_gradient_exists(
    two_ranks: Pool, engine: str, overlap: bool, cores: int
) -> None:
    """Unless the options forbid it, or shared memory would take a rank's only core from backward."""
    for differences in two_ranks.run(body_times, overlap, cores):
        if overlap and (cores > 1 or engine != "shared_memory"):
            assert np.sort(differences)[1] < 0, "in two of five steps, whatever else runs here"
        else:
            assert np.median(differences) > -0.02, (
                "what notes the time may itself come some milliseconds late"
            )


SMALL_POOLS = """
import time
import numpy as np, tensorflow as tf
import npu_device as npu
from hccl.split.api import set_split_strategy_by_idx
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
rank = npu.open().worker_id
set_split_strategy_by_idx(list(range(8)))

def slow(position):
    # The ranks make their gradients in opposite orders.
    wait = 0.02 * (position if rank else 7 - position)
    def make(x):
        time.sleep(wait)
        return x
    return make

@tf.function
def step(x):
    gradients = [tf.ensure_shape(tf.numpy_function(slow(i), [x * i], tf.float32), [100]) for i in range(8)]
    return npu.distribute.all_reduce(gradients, "sum")

for _ in range(5):
    result = step(tf.ones([100]))
print([float(value[0]) for value in result])
"""


def test_segments_cannot_deadlock_with_one_thread(tmp_path: Path) -> None:
    for output in job.outputs(tmp_path, 2, SMALL_POOLS):
        assert str([2.0 * i for i in range(8)]) in output


def body_order_kept(eager: bool) -> Any:
    rank = npu.open().worker_id

    def values() -> list[Any]:
        dtypes = [tf.float32, tf.float64, tf.float32, tf.int32, tf.float16, tf.float64]
        return [tf.cast(tf.fill([i + 1], i + rank), dtype) for i, dtype in enumerate(dtypes)]

    def reduce() -> list[Any]:
        return npu.distribute.all_reduce([*values(), None], "sum")

    result = reduce() if eager else tf.function(reduce)()
    return [
        None if value is None else (value.dtype.name, value.numpy().tolist()) for value in result
    ]


def body_bits() -> set[bytes]:
    values = [tf.random.stateless_normal([50], [npu.open().worker_id, place]) for place in range(8)]
    found = set()
    for ends in ([7], [0, 7], [2, 5, 7], list(range(8))):
        split_strategy.forget_strategies()
        set_split_strategy_by_idx(ends)
        found.add(tf.concat(npu.distribute.all_reduce(values, "mean"), axis=0).numpy().tobytes())
    split_strategy.forget_strategies()
    return found


def test_every_split_gives_the_same_bits_on_every_rank(several_ranks: Pool) -> None:
    assert len(set().union(*several_ranks.run(body_bits))) == 1


@pytest.mark.more_engines("tcp", "mpi", eager=[False])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_results_come_back_in_the_callers_order(ranks: Pool, eager: bool) -> None:
    n = ranks.size
    names = ["float32", "float64", "float32", "int32", "float16", "float64"]
    expected: list[Any] = [
        (name, [n * i + n * (n - 1) // 2] * (i + 1)) for i, name in enumerate(names)
    ]
    for found in ranks.run(body_order_kept, eager):
        assert found == [*expected, None]


# The order of production, read off the graph, or off the numbers of eager tensors

KINDS: dict[str, tuple[list[list[int]], list[int], list[int]]] = {
    # Chains of layers, the variables in the order in which a script would list them, and their places in the order.
    "chain": ([[0, 1, 2, 3, 4, 5]], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]),
    "shuffled list": ([[0, 1, 2, 3, 4, 5]], [3, 0, 5, 1, 4, 2], [2, 4, 0, 5, 3, 1]),
    # Layer 1 is used at the bottom and at the top: its gradient is there only when backward has come to the bottom.
    "shared layer": ([[0, 1, 2, 3, 4, 1, 5]], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]),
    "frozen layers": ([[0, 1, 2, 3, 4, 5]], [0, 2, 5], [2, 1, 0]),
    # A short branch beside a long one: the short one's bottom is there before the long one's.
    "branches": ([[0, 1, 2, 3, 4], [5]], [5, 0, 1, 2, 3, 4], [0, 5, 4, 3, 2, 1]),
}


def gradients_of(kind: str) -> list[Any]:
    chains, listed, _ = KINDS[kind]
    layers = [tf.Variable(tf.random.stateless_normal([4, 4], [1, 2])) for _ in range(6)]
    with tf.GradientTape() as tape:
        loss = 0.0
        for chain in chains:
            x = tf.ones([2, 4])
            for place in chain:
                x = tf.tanh(x @ layers[place])
            loss += tf.reduce_sum(x)
    return list(tape.gradient(loss, [layers[place] for place in listed]))


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled one by one"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_graph_are_ordered_by_their_production(kind: str, scaled: bool) -> None:
    with tf.Graph().as_default():
        gradients = [gradient / 8.0 if scaled else gradient for gradient in gradients_of(kind)]
        assert production_order(gradients) == KINDS[kind][2]


def test_eager_gradients_are_ordered_by_their_numbers() -> None:
    gradients = gradients_of("shuffled list")
    assert production_order(gradients) == [2, 4, 0, 5, 3, 1]
    assert production_order([gradient * 2.0 for gradient in gradients]) == [5, 4, 3, 2, 1, 0]
