"""The order of production that is read off the graph, or off the numbers of eager tensors.

That the first gradients travel while backward still runs is measured in ``test_segments.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from npu_device._src.gradients.segments import production_order

WIDTH = 4
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
    layers = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [1, 2])) for _ in range(6)]
    with tf.GradientTape() as tape:
        loss = 0.0
        for chain in chains:
            x = tf.ones([2, WIDTH])
            for place in chain:
                x = tf.tanh(x @ layers[place])
            loss += tf.reduce_sum(x)
    return list(tape.gradient(loss, [layers[place] for place in listed]))


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled one by one"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_graph(kind: str, scaled: bool) -> None:
    with tf.Graph().as_default():
        gradients = [gradient / 8.0 if scaled else gradient for gradient in gradients_of(kind)]
        assert production_order(gradients) == KINDS[kind][2]


def test_eager_gradients() -> None:
    gradients = gradients_of("shuffled list")
    assert production_order(gradients) == [2, 4, 0, 5, 3, 1]
    assert production_order([gradient * 2.0 for gradient in gradients]) == [5, 4, 3, 2, 1, 0]
