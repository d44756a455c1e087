"""A session's collective that waits: it says for whom, gives up in the end, and costs little in a large graph."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import job
import pytest
import tensorflow as tf
from pool import Pool
from ranks import table_environment

import npu_device as npu
from npu_bridge.hccl import hccl_ops
from npu_device._src.collectives.sessions import call_python
from npu_device._src.tf1.distributed_optimizer import NPUDistributedOptimizer

# Every rank has its own limit, so that one gives up while the others go on waiting.
WAITING = """
import time
import tensorflow as tf
import npu_device as npu

npu.open()
rank = npu.open().worker_id
with tf.Graph().as_default():
    first = npu.distribute.all_reduce(tf.constant(1.0), "sum")
    second = npu.distribute.all_reduce(tf.constant(2.0), "sum")
    with tf.compat.v1.Session() as session:
        session.run([first, second])
        begun = time.monotonic()
        try:
            if rank == 1:
                session.run(second)
            else:
                OTHERS
        except tf.errors.OpError as error:
            print(f"rank {rank} GAVE UP after {time.monotonic() - begun:.1f} s: {error}")
"""


@pytest.mark.parametrize("others", ["session.run(first)", "time.sleep(6)"])
def test_a_rank_that_waits_in_a_session_says_so_and_gives_up(tmp_path: Path, others: str) -> None:
    environments = [
        {
            **table_environment(tmp_path, 2, rank),
            "NPU_DEVICE_STALL_WARNING": warning,
            "NPU_DEVICE_STALL_TIMEOUT": limit,
        }
        for rank, (warning, limit) in enumerate([("90", "100"), ("1", "3")])
    ]
    first_line = 1 + WAITING.splitlines().index(
        '    first = npu.distribute.all_reduce(tf.constant(1.0), "sum")'
    )
    output = job.finish(
        job.start_each(tmp_path, WAITING.replace("OTHERS", others), environments), timeout=60
    )[1].output
    assert (
        "rank 1 has waited 1 s in group 'hccl_world_group'" in output
        or "rank 1 has waited 2 s" in output
    )
    assert "It keeps waiting for up to 3 s (NPU_DEVICE_STALL_TIMEOUT)." in output
    _, _, gave_up = output.partition("rank 1 GAVE UP after ")
    assert 2.5 < float(gave_up.split()[0]) < 15, output
    assert "This is the limit (NPU_DEVICE_STALL_TIMEOUT seconds), and the rank gives up." in gave_up
    assert "What to do:" in gave_up
    line = next(line for line in gave_up.splitlines() if "rank 0 on host" in line)
    if "sleep" in others:
        assert "hasn't arrived" in line
        return
    assert f"script.py:{first_line + 1} " in next(
        line for line in gave_up.splitlines() if "rank 1 on host" in line
    )
    assert "waits in session.run for another collective (all_reduce called at" in gave_up
    assert "is waiting" in line and f"script.py:{first_line} " in line


EAGER_BEFORE = """
import tensorflow as tf
import npu_device as npu

list(tf.data.Dataset.range(3))
tf.compat.v1.disable_v2_behavior()
npu.open()
x = tf.compat.v1.placeholder(tf.float32, [3])
total, spread = npu.distribute.all_reduce(x, "sum"), npu.distribute.hccl_ops.broadcast([x], 1)[0]
with tf.compat.v1.Session() as session:
    rank = npu.open().worker_id
    print("RESULT", *(value.tolist() for value in session.run([total, spread], {x: [rank, 1, 2]})))
"""


def test_a_session_after_eager_mode(tmp_path: Path) -> None:
    for output in job.outputs(tmp_path, 2, EAGER_BEFORE):
        assert "RESULT [1.0, 2.0, 4.0] [1.0, 1.0, 2.0]" in output


def graphs_that_go() -> list[bool]:
    """Return, for graphs that nobody refers to and for what their collectives refer to, if they are alive."""

    class Held:
        def __call__(self, value: Any) -> list[Any]:
            return [value + value, self][:1]  # value + 1 would be a double in NumPy 1

    size = npu.distribute.size()
    alive: list[Any] = []
    for _ in range(3):
        held = Held()
        with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
            [one] = call_python(held, [tf.constant(1.0)], [tf.TensorSpec([], tf.float32)])
            assert session.run(one) == 2.0
            weight = tf.compat.v1.get_variable("weight", initializer=1.0)
            shared = npu.distribute.all_reduce(weight, "sum")
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
            train = NPUDistributedOptimizer(optimizer).minimize(shared)
            session.run(tf.compat.v1.global_variables_initializer())
            others = hccl_ops.broadcast([shared], 0), hccl_ops.allgather(shared * [1.0], size)
            session.run([train, others])
            assert session.run(weight) == 1 - 0.5 * size
        alive += [weakref.ref(graph), weakref.ref(held)]
        del held, graph, session, one, weight, shared, optimizer, train, others
        gc.collect()
    return [reference() is not None for reference in alive]


def test_a_graph_goes_with_what_it_calls(two_ranks: Pool) -> None:
    assert two_ranks.run(graphs_that_go) == [[False] * 6] * 2


def sparse_means(dtype: str) -> tuple[str, list[float]]:
    rank = npu.open().worker_id
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = tf.cast(tf.fill([2, 2], rank + 1), dtype)
        slices = tf.IndexedSlices(
            values, tf.range(rank, rank + 2, dtype=tf.int64), tf.constant([6, 2], tf.int64)
        )
        [reduced] = npu.distribute.all_reduce([slices], "mean")
        assert reduced.shape[1:] == [2]
        return reduced.dtype.name, session.run(tf.convert_to_tensor(reduced))[:3, 0].astype(
            float
        ).tolist()


@pytest.mark.both_engines
def test_the_mean_of_sparse_integers(several_ranks: Pool) -> None:
    size = several_ranks.size
    expected = [
        sum(rank + 1 for rank in range(size) if rank <= row < rank + 2) / size for row in range(3)
    ]
    for dtype, mean in (("int8", "float32"), ("int32", "float64"), ("float16", "float16")):
        assert (
            several_ranks.run(sparse_means, dtype)
            == [(mean, pytest.approx(expected, rel=1e-2))] * size
        )
