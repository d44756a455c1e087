"""Reductions of which each rank gets the tensors that it owns, and broadcasts from the owners: on 1 to 4 ranks, through
each engine that has them, eagerly and in functions.

The reference is the reduction of everything on every rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any, Callable

import collective_bodies as bodies
import numpy as np
import pytest
import tensorflow as tf
from combinations import combinations
from mpi_ranks import MpiPool
from pool import Pool
from ranks import all_through

from npu_device._src.collectives.engines.engines import TwoLevelEngine
from npu_device._src.collectives.engines.host.memory_ring import Layout
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.ops import broadcast_from_owners
from npu_device._src.gradients.reduction import ReductionOptions, reduce_list

SLOT = Layout(2).slot_bytes // 4  # float32 numbers
SIZES = [7, 0, 1, SLOT - 1, 3, SLOT + 1, 16, 0, 2 * SLOT, 5]
KINDS = [
    ("float32", None, "mean"),
    ("float32", None, "sum"),
    ("float32", "fp16", "mean"),
    ("float32", "bf16", "sum"),
    ("float64", "bf16", "mean"),
    ("float16", None, "mean"),
    ("bfloat16", None, "sum"),
    ("int8", None, "sum"),
    ("int64", None, "mean"),
]


def _owners(size: int) -> dict[str, list[int]]:
    """Return owners of the tensors: in turn, very uneven ones, and such that leave some ranks without any."""
    count = len(SIZES)
    return {
        "in turn": [place % size for place in range(count)],
        "uneven": [size - 1 if length >= SLOT else 0 for length in SIZES],
        "only the last": [size - 1] * count,
        "the small ones": [
            0 if length > 16 else place % size for place, length in enumerate(SIZES)
        ],
    }


def _tensors(rank: int, dtype: str, sizes: list[int]) -> list[tf.Tensor]:
    chance = np.random.default_rng(rank)
    kind = tf.as_dtype(dtype).as_numpy_dtype
    return [tf.constant((chance.standard_normal(size) * 9).astype(kind)) for size in sizes]


def body_owners(graph: bool, same_bits: bool, alone: bool = False) -> list[str]:
    """Return what is wrong; ``alone``: in a group of this rank only."""
    job, group = bodies.group("world")
    if alone:
        group = Group(f"rank {group.rank}", (group.rank,), 0)
    assert job.engines.has_owners(group, [tf.float32, tf.int32])
    wrong = []
    for number, (dtype, compression, kind) in enumerate(KINDS):
        is_first = number == 0
        sizes = SIZES if is_first or not graph else [length % 1000 for length in SIZES]
        options = ReductionOptions(kind, compression=compression)
        tensors = _tensors(group.rank, dtype, sizes)
        for name, owners in _owners(group.size).items():
            if not is_first and name != "in turn":
                continue

            def both(
                *tensors: tf.Tensor, owners: Any = owners, options: Any = options
            ) -> tuple[Any, Any, Any]:
                everything = reduce_list(job, tensors, options, group)
                mine = reduce_list(job, tensors, options, group, owners)
                values = [
                    tf.TensorSpec(whole.shape, whole.dtype) if own is None else own
                    for own, whole in zip(mine, everything)
                ]
                spread = broadcast_from_owners(job, values, owners, group)
                return everything, [own for own in mine if own is not None], spread

            call = bodies.in_graph(both) if graph else both
            everything, mine, spread = call(*tensors)
            own = [whole for whole, owner in zip(everything, owners) if owner == group.rank]
            rounds = compression is not None and not same_bits
            for what, found, expected in (("reduced", mine, own), ("spread", spread, everything)):
                assert len(found) == len(expected)
                for place, (one, other) in enumerate(zip(found, expected)):
                    close = np.allclose(one, other, rtol=0.02, atol=0.02)
                    bits = one.numpy().tobytes() == other.numpy().tobytes()
                    if one.dtype != other.dtype or not (close if rounds else bits):
                        wrong.append(f"{what} {dtype} {compression} {kind} {name} {place}")
    return wrong


@pytest.mark.parametrize(
    ("count", "graph"),
    [
        (1, False),
        (2, True),
        (4, False),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((1, True), (2, False))),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((3, True), (3, False))),
        pytest.param(4, True, marks=pytest.mark.full),
    ],
)
def test_owners_alone_get_their_sums_in_shared_memory(
    pool_with: Callable[..., Pool], count: int, graph: bool
) -> None:
    ranks = pool_with(max(2, count), "3")
    assert ranks.run(body_owners, graph, True, count == 1) == [[]] * ranks.size


@pytest.mark.parametrize(("count", "graph"), combinations([2, 3], [False, True]))
def test_owners_get_their_sums_through_sockets(
    pool_with: Callable[..., Pool], count: int, graph: bool
) -> None:
    ranks = pool_with(count, "3", **all_through("tcp"))
    assert ranks.run(body_owners, graph, False) == [[]] * count


def body_little_data() -> Any:
    """Data so little that they would travel in the message that compares the call."""
    job, group = bodies.group("world")
    with bodies.small_data_in_messages():
        owners = [group.size - 1, 0]
        tensors = [tf.constant([float(group.rank)] * 3), tf.constant([1.0])]
        options = ReductionOptions("sum")
        mine = reduce_list(job, tensors, options, group, owners)
        values = [
            tf.TensorSpec(tensor.shape, tensor.dtype) if own is None else own
            for own, tensor in zip(mine, tensors)
        ]
        return [
            value.numpy().tolist() for value in broadcast_from_owners(job, values, owners, group)
        ]


def test_owners_get_little_data_in_a_message_of_their_own(pool_with: Callable[..., Pool]) -> None:
    ranks = pool_with(3, "3", **all_through("tcp"))
    assert ranks.run(body_little_data) == [[[3.0] * 3, [3.0]]] * 3


def body_other_owners() -> str:
    job, group = bodies.group("world")
    owners = [0, 1] if group.rank == 0 else [1, 0]
    tensors = [tf.ones([3]), tf.ones([4])]
    try:
        reduce_list(job, tensors, ReductionOptions("mean"), group, owners)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_different_owners_are_told(pool_with: Callable[..., Pool]) -> None:
    for text in pool_with(2, "3").run(body_other_owners):
        assert "They differ in: owners" in text, text


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_owners_get_their_sums_through_mpi() -> None:
    with contextlib.closing(MpiPool(3, "MPICH")) as ranks:
        for graph in (False, True):
            assert ranks.run(body_owners, graph, False) == [[]] * 3


def body_two_levels() -> list[str]:
    """Return what is wrong with two levels: rank 0 and 1 stand for a host, and so does rank 2."""
    job, group = bodies.group("world")
    hosts = replace(job.hosts, leaders=(0, 0, 2))
    engine = TwoLevelEngine(hosts, job.engines.shared_memory, job.engines.by_name["tcp"])
    wrong = []

    def all_of(*tensors: tf.Tensor, owners: list[int]) -> Any:
        segments = [tensors[:4], tensors[4:]]
        parts = [owners[:4], owners[4:]]
        everything = engine.all_reduce(segments, "mean", group, None)
        mine = engine.reduce_to_owners(segments, parts, "mean", group, None)
        whole = [one for segment in everything for one in segment]
        own = iter([one for segment in mine for one in segment])
        values = [
            next(own) if owner == group.rank else tf.TensorSpec(one.shape, one.dtype)
            for one, owner in zip(whole, owners)
        ]
        return whole, engine.broadcast(values, owners, group)

    for number, (name, owners) in enumerate(_owners(group.size).items()):
        call: Any = partial(all_of, owners=owners)
        if number % 2:
            call = bodies.in_graph(call)
        whole, spread = call(*_tensors(group.rank, "float32", SIZES))
        for place, (one, other) in enumerate(zip(whole, spread)):
            if one.numpy().tobytes() != other.numpy().tobytes():
                wrong.append(f"{name} {place}")
    return wrong


def test_owners_get_their_sums_on_two_levels(pool_with: Callable[..., Pool]) -> None:
    assert pool_with(3, "3").run(body_two_levels) == [[]] * 3
