"""A session's collective that waits: it says for whom, gives up in the end, and costs little in a large graph."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import job
import pytest
import tensorflow as tf
from pool import Pool
from ranks import all_through, table_environment

import npu_device as npu
from npu_device._src.collectives.sessions import call_python

# Every rank has its own limit, so that one gives up while the others go on waiting.
WAITING = """
import pathlib, time
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
            elif FETCHES:
                session.run(first)
            else:
                while not pathlib.Path(GAVE_UP).exists():
                    time.sleep(0.1)
        except tf.errors.OpError as error:
            print(f"rank {rank} GAVE UP after {time.monotonic() - begun:.1f} s: {error}")
            pathlib.Path(GAVE_UP).touch()
"""


@pytest.mark.both_backends
@pytest.mark.parametrize("fetches", [True, False], ids=["others-fetch-something-else", "others-fetch-nothing"])
def test_a_rank_that_waits_in_a_session_says_so_and_gives_up(tmp_path: Path, fetches: bool, backend: str) -> None:
    environments = [
        {
            **table_environment(tmp_path, 2, rank),
            **all_through(backend),
            "NPU_DEVICE_STALL_WARNING": "1" if rank == 1 else "90",
            "NPU_DEVICE_STALL_TIMEOUT": "3" if rank == 1 else "100",
        }
        for rank in range(2)
    ]
    script = WAITING.replace("FETCHES", str(fetches)).replace("GAVE_UP", repr(str(tmp_path / "gave up")))
    first_line = 1 + script.splitlines().index('    first = npu.distribute.all_reduce(tf.constant(1.0), "sum")')
    begun = time.monotonic()
    ended = job.finish(job.start_each(tmp_path, script, environments), timeout=90)
    assert time.monotonic() - begun < 60
    output = ended[1].output
    assert "rank 1 has waited 1 s in group 'hccl_world_group'" in output or "rank 1 has waited 2 s" in output
    assert "It keeps waiting for up to 3 s (NPU_DEVICE_STALL_TIMEOUT)." in output
    _, _, gave_up = output.partition("rank 1 GAVE UP after ")
    assert 2.5 < float(gave_up.split()[0]) < 15, output
    assert "This is the limit (NPU_DEVICE_STALL_TIMEOUT seconds), and the rank gives up." in gave_up
    assert "What to do:" in gave_up
    if fetches:
        assert f"script.py:{first_line + 1} " in next(line for line in gave_up.splitlines() if "rank 1 on host" in line)
        assert "waits in session.run for another collective (all_reduce called at" in gave_up
        line = next(line for line in gave_up.splitlines() if "rank 0 on host" in line)
        assert "is waiting" in line and f"script.py:{first_line} " in line
    else:
        assert "hasn't arrived" in next(line for line in gave_up.splitlines() if "rank 0 on host" in line)


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

    alive: list[Any] = []
    for _ in range(3):
        held = Held()
        with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
            [one] = call_python(held, [tf.constant(1.0)], [tf.TensorSpec([], tf.float32)])
            assert session.run(one) == 2.0
        alive += [weakref.ref(graph), weakref.ref(held)]
        del held, graph, session, one
        gc.collect()
    return [reference() is not None for reference in alive]


def test_a_graph_goes_with_what_it_calls(two_ranks: Pool) -> None:
    assert two_ranks.run(graphs_that_go) == [[False] * 6] * 2


def sparse_means() -> dict[str, tuple[str, list[float]]]:
    rank = npu.open().worker_id
    found = {}
    for dtype in ("int8", "int32", "float16"):
        for rows in (2, 70_000) if "32" in dtype else (2,):  # both sides of a slot
            with tf.Graph().as_default():
                values = tf.cast(tf.fill([rows, 2], rank + 1), dtype)
                lengths = tf.constant([3 * rows, 2], tf.int64)
                slices = tf.IndexedSlices(values, tf.range(rank, rank + rows, dtype=tf.int64), lengths)
                [reduced] = npu.distribute.all_reduce([slices], "mean")
                assert reduced.shape[1:] == [2]
                with tf.compat.v1.Session() as session:
                    dense = session.run(tf.convert_to_tensor(reduced))
                    found[f"{dtype} {rows}"] = (reduced.dtype.name, [float(dense[row, 0]) for row in (0, 1, rows)])
    return found


@pytest.mark.both_backends
def test_the_mean_of_sparse_integers(several_ranks: Pool) -> None:
    size = several_ranks.size
    means = {"int8": "float32", "int32": "float64", "float16": "float16"}
    for found in several_ranks.run(sparse_means):
        for key, (dtype, values) in found.items():
            assert dtype == means[key.split()[0]]
            rows = int(key.split()[1])
            expected = [
                sum(rank + 1 for rank in range(size) if rank <= row < rank + rows) / size for row in (0, 1, rows)
            ]
            assert values == pytest.approx(expected, rel=1e-2 if "16" in key else 1e-6), key
