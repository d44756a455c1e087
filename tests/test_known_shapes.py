"""Graphs of which only some know the shapes: all ranks get the results of eager calls, or one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

import job
import pytest
import tensorflow as tf
from caught_messages import error_of
from collective_bodies import all_to_all, group, in_graph
from pool import Pool

from npu_device._src.collectives.engines.engines import TwoLevelEngine
from npu_device._src.collectives.moves import all_gather, all_gather_v
from npu_device._src.collectives.ops import all_reduce, broadcast, reduce, reduce_scatter
from npu_device._src.gradients.reduction import ReductionOptions, reduce_list
from npu_device._src.horovod import tensor_ops as hvd

# As many elements each, so that a rank that sent the first one flat would take the keys of the second.
SHAPES = ((60, 40), (2400,), (120, 20))


def _operations(job: Any, mine: Any, tensor: tf.Tensor) -> dict[str, Sequence[tf.Tensor]]:
    last = mine.size - 1
    flat = tf.reshape(tensor, [-1])
    several = [flat, tf.cast(flat, tf.bool), flat[:0], tensor, tf.cast(flat, tf.complex64), tensor]
    shape = tf.concat([[7], tf.shape(tensor)[1:]], 0)
    rows = tf.IndexedSlices(tensor, tf.range(tf.shape(tensor)[0]) % 7, shape)

    def reduced(value: Any, **options: Any) -> list[tf.Tensor]:
        return tf.nest.flatten(
            reduce_list(job, value, ReductionOptions("sum", **options), mine), True
        )

    return {
        "all_reduce": [all_reduce(job, tensor, how, mine) for how in ("sum", "mean", "max")],
        "reduce": [reduce(job, tensor, "sum", last, mine)],
        "reduce_scatter": [reduce_scatter(job, tensor, "sum", mine)],
        "all_gather": [all_gather(job, tensor, mine)],
        "all_gather_v": [all_gather_v(job, tensor[mine.rank :], mine)],
        "all_to_all": [all_to_all(job, tensor, mine)],
        "broadcast": broadcast(job, [tensor], 0, mine),
        "broadcast of several": broadcast(job, several, last, mine),
        # Two transfers of a call, of which one is in 16 bits.
        "transfers": reduced([tensor, tf.cast(flat, tf.int32)], fusion=0, compression="fp16"),
        "rows": reduced([rows]),
        "sums of rows": reduced([rows], adds_rows=True),
        "allreduce": [hvd.allreduce(tensor)],
        "reducescatter": [hvd.reducescatter(tensor), hvd.reducescatter(tensor[1:], op=hvd.Sum)],
        "alltoall": [hvd.alltoall(tensor), *hvd.alltoall(tensor, tf.range(mine.size))],
    }


def _different(found: Sequence[tf.Tensor], right: Sequence[tf.Tensor]) -> bool:
    def contents(tensors: Sequence[tf.Tensor]) -> list[Any]:
        arrays = [tensor.numpy() for tensor in tensors]
        return [(array.dtype, array.shape, array.tobytes()) for array in arrays]

    return contents(found) != contents(right)


def _as_known(
    rank: int, unknown: int, call: Callable, tensor: tf.Tensor, knows_rank: bool = True
) -> Any:
    """Call a function of which one rank doesn't know the shape while tracing, or not even the number of dimensions."""
    shape = tensor.shape
    if rank == unknown:
        shape = [None] * shape.rank if knows_rank else None
    return in_graph(call, input_signature=[tf.TensorSpec(shape, tensor.dtype)])(tensor)


def body_mixed(unknown: int) -> tuple[list[str], Any, Any]:
    """Return what isn't as in eager mode, and what all ranks have to have in common: keys, and a count of transfers."""
    job, mine = group("world")
    wrong = []
    operations = partial(_operations, job, mine)
    for shape, dtype in zip(SHAPES, ("float32", "float32", "bfloat16")):
        tensor = tf.cast(tf.reshape(tf.range(2400) % 5 + mine.rank, shape), dtype)
        right = operations(tensor)
        found = _as_known(mine.rank, unknown, operations, tensor, knows_rank=dtype == "float32")
        wrong += [f"{name} of {shape}" for name in right if _different(found[name], right[name])]
    drawn = job.engines.tensorflow.kernels.sequence_of(mine)._drawn
    return wrong, list(drawn.items()), job.counts.started()[mine.name, mine.ranks]


def body_small_transfers(body: Callable, *arguments: Any) -> Any:
    """Run a body with lists that take several transfers, some of several tensors."""
    job, _ = group("world")
    usual = job.engines.tensorflow.transfer_bytes
    job.engines.tensorflow.transfer_bytes = 12_000
    try:
        return body(*arguments)
    finally:
        job.engines.tensorflow.transfer_bytes = usual


@pytest.mark.more_engines("tcp", "mpi", "Open MPI", unknown=[0])
@pytest.mark.parametrize("unknown", [0, 1])
def test_one_rank_does_not_know_the_shapes(several_ranks: Pool, unknown: int) -> None:
    _assert_right(several_ranks.run(body_mixed, unknown))


@pytest.mark.parametrize("unknown", [0, 1])
def test_one_rank_does_not_know_the_shapes_that_tensorflow_sends(
    tensorflow_ranks: Pool, unknown: int
) -> None:
    _assert_right(tensorflow_ranks.run(body_small_transfers, body_mixed, unknown))


def _assert_right(results: Sequence[tuple[list[str], Any, Any]]) -> None:
    for wrong, keys, counts in results:
        assert wrong == []
        assert (keys, counts) == results[0][1:]


def body_two_levels(unknown: int) -> list[str]:
    """Return what is wrong if rank 0 and 1 stand for a host, and so does rank 2."""
    job, mine = group("world")
    hosts = replace(job.hosts, leaders=(0, 0, 2))
    engine = TwoLevelEngine(hosts, job.engines.shared_memory, job.engines.tensorflow)

    def operations(tensor: tf.Tensor) -> dict[str, Sequence[tf.Tensor]]:
        flat = tf.reshape(tensor, [-1])
        return {
            "all_reduce": engine.all_reduce([[tensor]], "mean", mine, None)[0],
            "broadcast": engine.broadcast([flat, tensor, flat[:5]], [2, 0, 2], mine),
        }

    wrong = []
    for shape in SHAPES:
        tensor = tf.reshape(tf.range(2400.0) + mine.rank, shape)
        right = operations(tensor)
        found = _as_known(mine.rank, unknown, operations, tensor)
        wrong += [f"{name} of {shape}" for name in right if _different(found[name], right[name])]
    return wrong


@pytest.mark.parametrize("unknown", [0, 1, 2])
@pytest.mark.parametrize("tensorflow_ranks", [3], indirect=True)
def test_one_rank_of_two_hosts_does_not_know_the_shapes(
    tensorflow_ranks: Pool, unknown: int
) -> None:
    found = tensorflow_ranks.run(body_small_transfers, body_two_levels, unknown)
    assert found == [[]] * 3


def body_unknown_table() -> str:
    job, mine = group("world")
    length = [None, [4, 2]][mine.rank % 2]
    rows = tf.IndexedSlices(tf.ones([1, 2]), [0], length)
    return error_of(reduce_list, job, [rows], ReductionOptions("sum", adds_rows=True), mine)


@pytest.mark.both_engines
def test_a_table_whose_length_some_ranks_do_not_know(several_ranks: Pool) -> None:
    for text in several_ranks.run(body_unknown_table):
        assert "They differ in: tensor_0" in text and "without dense_shape" in text, text


LOOKUPS = """
import tensorflow as tf, npu_device as npu
rank, table = npu.open().worker_id, tf.ones([100, 8])

def step(indices):
    indices, _ = tf.unique(indices)
    return npu.distribute.all_reduce(tf.IndexedSlices(tf.gather(table, indices), indices, [100, 8]))

print((tf.function(step, autograph=False) if rank else step)(tf.range(3)))
"""


@pytest.mark.slow
def test_lookups_that_only_a_graph_tells(tmp_path: Path) -> None:
    for output in job.outputs(tmp_path, 2, LOOKUPS, code=1):
        assert "They differ in: tensor_0" in output and "lookups with distinct rows" in output
