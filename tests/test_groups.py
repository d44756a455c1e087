"""``hccl.manage.api``: groups of ranks, what they are asked, and collectives in them."""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

import job
import pytest
import tensorflow as tf
from caught_messages import error_of
from collective_bodies import wrong_refusals
from pool import Pool
from ranks import table_environment

import npu_device as npu
from hccl.manage import api
from hccl.manage.api import create_group, destroy_group, get_rank_id, get_rank_size
from npu_device._src.training.distribute.groups import _own_groups
from npu_device.distribute import hccl_ops


def forgets(body: Callable[..., Any]) -> Callable[..., Any]:
    """Destroy the groups that a body leaves behind, which the workers of a pool would keep."""

    @functools.wraps(body)
    def call(*arguments: Any) -> Any:
        try:
            return body(*arguments)
        finally:
            for name in list(_own_groups()):
                destroy_group(name)

    return call


def body_questions() -> Any:
    return get_rank_size(), get_rank_id(), api.get_local_rank_size(), api.get_local_rank_id()


REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "get_group_rank_from_world_rank",
        (0, "a"),
        "expected a member of group 'a': world rank(s) 2, 3",
    ),
    ("get_world_rank_from_group_rank", ("a", 2), "expected a rank from 0 to 1"),
    ("get_group_rank_from_world_rank", ("3", "a"), "world_rank_id is '3'"),
    ("create_group", ("a", 2, [2, 3]), "belongs to the group of rank(s) 2, 3"),
    ("create_group", ("b", 2, [0, 1]), "is not among rank_ids [0, 1]"),
    ("create_group", ("c", 3, [2, 3]), "has 2 entries; expected 3"),
    ("create_group", ("d", 2, (2, 3)), "a tuple; expected a list"),
    ("create_group", ("e", 3, [2, 3, 2]), "names 2 more than once"),
    (
        "create_group",
        ("e", 3, [2, 3, 4]),
        "rank_ids[2] is 4; expected a world rank, a whole number from 0 to 3",
    ),
    ("create_group", ("e", 2, [2, 3.0]), "rank_ids[1] is 3.0"),
    ("create_group", ("e", 0, []), "rank_num is 0"),
    ("create_group", ("e", "2", [2, 3]), "rank_num is '2'"),
    ("create_group", ("", 1, [2]), "1 to 127 bytes"),
    ("create_group", ("x" * 128, 1, [2]), "it has 128 bytes"),
    ("create_group", (5, 1, [2]), "group 5 is not the name of a group"),
    ("create_group", ("hccl_world_group", 1, [2]), "all 4 ranks"),
    ("destroy_group", ("hccl_world_group",), "can't be destroyed"),
    ("destroy_group", ("nope",), "no group named 'nope'"),
    ("get_rank_size", ("nope",), "create_group"),
    ("get_local_rank_id", ("nope",), "'hccl_world_group' (all 4 ranks), 'a' (ranks 2, 3)"),
]


@forgets
def body_table() -> Any:
    """The behaviour table of Ascend's pages, as world rank 2 of 4 sees it."""
    if api.get_rank_id() < 2:
        return None
    assert api.create_group("a", 2, [3, 2]) is None
    mine = api.get_rank_id() - 2
    assert (api.get_rank_id("a"), api.get_rank_size("a")) == (mine, 2)
    assert (api.get_local_rank_size("a"), api.get_local_rank_id("a")) == (2, mine)
    assert api.get_world_rank_from_group_rank("a", 1) == 3
    assert api.get_group_rank_from_world_rank(3, "a") == 1
    wrong = wrong_refusals(
        *(("ValueError", says, getattr(api, name), *given) for name, given, says in REFUSED)
    )
    assert "no group named 'nope'" in error_of(npu.distribute.all_reduce, 1.0, "sum", 1, -1, "nope")
    assert api.destroy_group("a") is None
    assert f"rank {mine + 2}: there is no group named 'a'" in error_of(api.get_rank_size, "a")
    assert api.create_group("x" * 127, 1, [api.get_rank_id()]) is None
    return wrong


def test_ascends_behaviour_table(pool_with: Callable[..., Pool]) -> None:
    four_ranks = pool_with(4, "3")
    worlds = four_ranks.run(body_questions)
    assert worlds == [(4, rank, 4, rank) for rank in range(4)]
    assert all(type(value) is int for value in worlds[0])
    assert four_ranks.run(body_table) == [None, None, [], []]


@forgets
def body_disjoint(graph: bool) -> None:
    """Two groups of one name at the same time: the ranks of either half."""
    rank, size = get_rank_id(), get_rank_size()
    half = [other for other in range(size) if (other < 2) == (rank < 2)]
    create_group("half", len(half), half[::-1])

    def reduce(value: Any) -> Any:
        return [npu.distribute.all_reduce(value, how, group="half") for how in ("sum", "mean")]

    call = tf.function(reduce) if graph else reduce
    total = sum(10.0**other for other in half)
    for i in range(5):
        found = [value.numpy().tolist() for value in call(tf.constant([10.0**rank, i]))]
        assert found == [[total, 2.0 * i], [total / 2, float(i)]]
    variable = tf.Variable(float(rank))
    npu.distribute.broadcast([variable], root_rank=len(half) - 1, group="half")
    assert float(variable) == half[-1]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_one_name_for_disjoint_groups(pool_with: Callable[..., Pool], graph: bool) -> None:
    pool_with(4, "3").run(body_disjoint, graph)


@forgets
def body_several() -> Any:
    """Overlapping groups of two out of three, and each rank by itself, all in use at once and in another order."""
    rank = get_rank_id()
    pairs = {"first": [0, 1], "last": [2, 1], "outer": [2, 0]}
    mine = {name: members for name, members in pairs.items() if rank in members}
    for name, members in mine.items():
        create_group(name, 2, members)
    create_group("me", 1, [rank])

    @tf.function
    def reduce(value: Any) -> Any:
        names = [*mine, "me", "hccl_world_group"]
        return {name: npu.distribute.all_reduce(value, "sum", group=name) for name in names}

    reduced = [reduce(tf.constant(10.0**rank)) for _ in range(3)][-1]
    return {name: float(value) for name, value in reduced.items()}


@pytest.mark.more_engines("tcp", "mpi")
@pytest.mark.parametrize("several_ranks", [3], indirect=True)
def test_overlapping_groups_and_groups_of_one(several_ranks: Pool) -> None:
    first, last, outer, world = 11.0, 110.0, 101.0, 111.0
    assert several_ranks.run(body_several) == [
        {"first": first, "outer": outer, "me": 1.0, "hccl_world_group": world},
        {"first": first, "last": last, "me": 10.0, "hccl_world_group": world},
        {"last": last, "outer": outer, "me": 100.0, "hccl_world_group": world},
    ]


@forgets
def body_again() -> Any:
    """A name that is used for one group after the other, and for the first one again."""
    rank, size = get_rank_id(), get_rank_size()
    found = []
    for members in ([0, size - 1], list(range(size)), [size - 1, 0], [size - 1, 0]):
        found.append([])
        if rank in members:
            create_group("name", len(members), members)
            results = [
                npu.distribute.all_reduce(tf.constant(rank + 1), "sum", group="name")
                for _ in range(2)
            ]
            found[-1] = [int(result) for result in results]
            destroy_group("name")
    return found


@pytest.mark.more_engines("tcp", "mpi")
def test_destroyed_and_made_again(several_ranks: Pool) -> None:
    size = several_ranks.size
    outer, world = [size + 1] * 2, [size * (size + 1) // 2] * 2
    for rank, found in enumerate(several_ranks.run(body_again)):
        ends = outer if rank in (0, size - 1) else []
        assert found == [ends, world, ends, ends]


def body_functions_of_a_destroyed_group(length: int) -> str:
    """Call a function again whose group is gone; return the error."""
    size = get_rank_size()
    create_group("gone", size, list(range(size)))
    add_up = tf.function(lambda x: npu.distribute.all_reduce(x, "sum", group="gone"))
    add_up(tf.ones([length]))
    destroy_group("gone")
    with pytest.raises(tf.errors.OpError) as caught:
        add_up(tf.ones([length]))
    return str(caught.value)


@pytest.mark.more_engines("tcp", "mpi")
def test_functions_of_a_destroyed_group_fail(several_ranks: Pool) -> None:
    # A longer transfer has a thread of its own.
    for length in (1, 100_000):
        for error in several_ranks.run(body_functions_of_a_destroyed_group, length, timeout=30):
            assert "group was destroyed" in error


def body_destroyed_while_the_sender_sleeps(length: int) -> tuple[float, float]:
    """Receive, and destroy the group, while the sender is stopped: it finds the answer, and then perhaps the end of a
    connection, at the same time.
    """
    rank, size = npu.open().worker_id, npu.open().workers_num
    sender = int(hccl_ops.broadcast([tf.constant(os.getpid())], 0)[0])
    received = 0.0
    create_group("brief", size, list(range(size)))
    if rank == 0:
        hccl_ops.send(tf.ones([length]), 0, 1, "brief")
    if rank != 1:
        destroy_group("brief")
    else:
        time.sleep(0.5)  # by then the sender waits for the answer
        os.kill(sender, signal.SIGSTOP)
        with subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {sender}"]):
            received = float(tf.reduce_sum(hccl_ops.receive([length], tf.float32, 0, 0, "brief")))
            destroy_group("brief")
    return received, float(npu.distribute.all_reduce(tf.ones([]), "sum"))


@pytest.mark.more_engines("tcp", "mpi")
def test_destroyed_while_the_sender_sleeps(several_ranks: Pool) -> None:
    for length in (1, 100_000):
        found = several_ranks.run(body_destroyed_while_the_sender_sleeps, length, timeout=30)
        assert [received for received, _ in found] == [0, length, 0][: several_ranks.size]
        assert {total for _, total in found} == {several_ranks.size}


@forgets
def body_single() -> Any:
    found = [api.create_group("a", 1, [0]), api.get_rank_size("a"), api.get_rank_id("a")]
    found += [api.get_local_rank_size("a"), api.get_local_rank_id("a")]
    found += [
        api.get_world_rank_from_group_rank("a", 0),
        api.get_group_rank_from_world_rank(0, "a"),
    ]
    # Asked while a function is traced, where AutoGraph would convert what it can.
    found += (
        tf.function(lambda: tf.constant([get_rank_size(), api.get_local_rank_id("a")]))()
        .numpy()
        .tolist()
    )
    texts = [error_of(api.create_group, "a", 1, [0]), error_of(api.create_group, "b", 1, [1])]
    texts += [error_of(api.create_group, "b", 2, [0, 1]), error_of(api.get_rank_size, "b")]
    found.append(api.destroy_group("a"))
    return found, texts


def test_a_single_device_checks_and_answers(single: Pool) -> None:
    [(found, texts)] = single.run(body_single)
    assert found == [None, 1, 0, 1, 0, 0, 0, 1, 0, None]
    assert "belongs to the group of rank(s) 0" in texts[0]
    assert "from 0 to 0" in texts[1] and "from 0 to 0" in texts[2]
    assert "no group named 'b'" in texts[3]


UNEVEN = """
from hccl.manage.api import *
create_group("all", 3, [2, 1, 0])  # no npu.open(): it opens by itself
rank = get_rank_id()
other = [1] if rank == 1 else [0, 2]
create_group("other", len(other), other)
groups = ("hccl_world_group", "all", "other")
print("found", rank, [(get_local_rank_size(group), get_local_rank_id(group)) for group in groups])
"""


def test_local_ranks_are_those_on_the_same_host_and_the_device_opens_by_itself(
    tmp_path: Path,
) -> None:
    """Ascend's 3 ranks // 2 hosts would be one rank per host, and rank 1 the first of its own."""
    environments = [table_environment(tmp_path, 3, rank) for rank in range(3)]
    table = json.loads((tmp_path / "ranks.json").read_text())
    [here] = table["server_list"]
    table["server_list"].append({**here, "server_id": "there", "device": [here["device"].pop()]})
    (tmp_path / "ranks.json").write_text(json.dumps({**table, "server_count": "2"}))
    results = job.finish(job.start_each(tmp_path, UNEVEN, environments), timeout=120)
    expected = [[(2, 0), (2, 0), (1, 0)], [(2, 1), (2, 1), (1, 0)], [(1, 0), (1, 0), (1, 0)]]
    for rank, result in enumerate(results):
        assert result.code == 0, result.output
        assert f"found {rank} {expected[rank]}\n" in result.output


def test_signatures_are_those_of_ascend() -> None:
    functions = {name: each for name, each in vars(api).items() if inspect.isfunction(each)}
    questions = ("get_rank_size", "get_local_rank_size", "get_rank_id", "get_local_rank_id")
    assert {name: str(inspect.signature(each)) for name, each in functions.items()} == {
        "create_group": "(group: 'str', rank_num: 'int', rank_ids: 'list[int]') -> 'None'",
        "destroy_group": "(group: 'str') -> 'None'",
        **dict.fromkeys(questions, "(group: 'str' = 'hccl_world_group') -> 'int'"),
        "get_world_rank_from_group_rank": "(group: 'str', group_rank_id: 'int') -> 'int'",
        "get_group_rank_from_world_rank": "(world_rank_id: 'int', group: 'str') -> 'int'",
    }
