"""Pairs of ranks: rings, tags that are called in another order on the two sides, pairs in groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import as_they_are, group, in_graph, small_data_in_messages, wrong_refusals
from pool import Pool

from npu_device._src.collectives.moves import receive, send

pytestmark = pytest.mark.both_backends


def body_ring(length: int) -> Any:
    job, mine = group("world")
    send_as_it_is, receive_as_it_is = as_they_are(send, receive)
    following, before = (mine.rank + 1) % mine.size, (mine.rank - 1) % mine.size

    @tf.function
    def ring(steps: tf.Tensor) -> tf.Tensor:
        value = tf.fill([length], tf.cast(mine.rank, tf.int16))
        for _ in tf.range(steps):
            send_as_it_is(job, value, 3, following, mine)  # everybody sends before anybody receives
            value = receive_as_it_is(job, [length], tf.int16, 3, before, mine)
        return value

    return ring(tf.constant(1)).numpy(), ring(tf.constant(mine.size)).numpy()


def test_everybody_sends_first_in_a_graph(several_ranks: Pool) -> None:
    n = several_ranks.size
    for length in (0, 1, 2_000_001):  # the last one is more than sockets hold
        for rank, (once, around) in enumerate(several_ranks.run(body_ring, length, timeout=30)):
            np.testing.assert_array_equal(once, np.full(length, (rank - 1) % n))
            np.testing.assert_array_equal(around, np.full(length, rank))


def body_tags() -> Any:
    job, mine = group("world")
    last = mine.size - 1

    def crossed() -> list[tf.Tensor]:
        if mine.rank == 0:
            for tag in (1, 2, 3):
                send(job, tf.fill([4], float(tag)), tag, last, mine)
        elif mine.rank == last:
            return [receive(job, [4], tf.float32, tag, 0, mine) for tag in (3, 1, 2)]
        return []

    found = [value.numpy().tolist() for value in in_graph(crossed)()]
    for call in range(14):  # the same tag again is a queue; more tags than connections that are kept
        tag = 1 if call < 2 else call % 6
        if mine.rank == 0:
            send(job, tf.constant([call, call]), tag, last, mine)
        elif mine.rank == last:
            found.append(receive(job, (2,), tf.int32, tag, 0, mine).numpy().tolist())
    return found


def test_tags_are_not_mixed_up(several_ranks: Pool) -> None:
    *others, last = several_ranks.run(body_tags, timeout=30)
    assert others == [[]] * (several_ranks.size - 1)
    assert last == [[3.0] * 4, [1.0] * 4, [2.0] * 4, *([call] * 2 for call in range(14))]


def body_small() -> list[list[float]]:
    """Send what fits into a message and what doesn't, in turns, with one function that doesn't know how much it is."""
    job, mine = group("world")
    to, source = (mine.rank + 1) % mine.size, (mine.rank - 1) % mine.size

    def to_the_next(value: tf.Tensor) -> None:
        send(job, value, 5, to, mine)

    sending = in_graph(to_the_next, input_signature=[tf.TensorSpec([None])])
    found = []
    with small_data_in_messages():
        for length in (3, 256, 257, 0, 5000, 1):
            if mine.rank % 2 == 0:
                sending(tf.fill([length], float(mine.rank)))
            got = receive(job, [length], tf.float32, 5, source, mine).numpy()
            if mine.rank % 2 == 1:
                to_the_next(tf.fill([length], float(mine.rank)))
            assert len(got) == length
            found.append(sorted(set(got.tolist())))
    return found


def test_small_data_and_large_data_in_turns(several_ranks: Pool) -> None:
    for rank, found in enumerate(several_ranks.run(body_small)):
        before = [float((rank - 1) % several_ranks.size)]
        assert found == [before, before, before, [], before, before]


def body_refusals() -> list[str]:
    job, mine = group("world")
    one, other, size = tf.constant([1.0]), (mine.rank + 1) % mine.size, mine.size
    return wrong_refusals(
        ("ValueError", "with itself", send, job, one, 0, mine.rank, mine),
        (f"ValueError: dest_rank {size} ", f"expected 0 to {size - 1}", send, job, one, 0, size, mine),
        ("ValueError: src_rank -1 ", "", receive, job, [1], tf.float32, 0, -1, mine),
        ("TypeError", "string", send, job, tf.constant("text"), 0, other, mine),
        ("ValueError", "every dimension", receive, job, [None, 2], tf.float32, 0, other, mine),
    )


def test_refusals(several_ranks: Pool) -> None:
    assert several_ranks.run(body_refusals) == [[]] * several_ranks.size
