"""Which random numbers of a step the ranks share, by the step's graph alone: one process, and no rank."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import tensorflow as tf

ROWS = 6


def _marked(value: Any) -> Any:
    """A generator's state into which a rank is mixed."""
    from npu_device._src.training.fit.randomness import MARK

    return tf.add(value, 1, name=MARK)


def _stateless(x: Any, weight: Any, state: Any) -> Any:
    return tf.random.stateless_normal(tf.shape(x), _marked(state))


def _crop(x: Any, weight: Any, state: Any) -> Any:
    seeds = tf.random.stateless_uniform([1], _marked(state), minval=None, maxval=None, dtype=tf.int32)
    return tf.random.stateless_uniform([ROWS, 1], tf.concat([seeds, [0]], 0))


def _branch(x: Any, weight: Any, state: Any) -> Any:
    return tf.cond(tf.reduce_sum(tf.random.uniform([4])) < 2, lambda: x, lambda: 2 * x)


def _branch_in_loop(x: Any, weight: Any, state: Any) -> Any:
    chance = tf.random.uniform([4])
    for row in tf.range(3):
        if chance[row] < 0.5:
            x *= 2.0
    return x


def _loop(x: Any, weight: Any, state: Any) -> Any:
    noise = tf.random.normal(tf.shape(x))
    for _ in tf.range(tf.random.uniform([], 1, 4, tf.int32)):
        noise = noise * 2.0 + tf.random.normal([2])  # the second one is inside, and each rank's own
    return noise


def _branch_on_samples(x: Any, weight: Any, state: Any) -> Any:
    noisy = x + tf.random.normal(tf.shape(x))
    return tf.cond(tf.reduce_sum(noisy) > 0, lambda: noisy, lambda: 2 * noisy)


def _function(x: Any, weight: Any, state: Any) -> Any:
    @tf.function
    def inside(x: Any) -> Any:
        return tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: x + tf.random.normal(tf.shape(x)))

    return inside(x)


def _gradients(x: Any, weight: Any, state: Any) -> Any:
    latent = tf.random.normal([tf.shape(x)[0], 2])
    with tf.GradientTape() as tape:
        tape.watch(weight)
        value = latent
        for _ in tf.range(3):
            value = tf.tanh(value @ weight)
        loss = tf.reduce_sum(value)
    return tape.gradient(loss, weight) + tf.random.normal([2, 2])


STEPS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "for samples": (lambda x, w, s: _normal_like(x), [""]),
    "stateless": (_stateless, [""]),
    "seeds of seeds": (_crop, [""]),
    "a number": (lambda x, w, s: x * _uniform([]), ["is one for the whole batch"]),
    "a row": (lambda x, w, s: x * _uniform([1, 2]), ["is one for the whole batch"]),
    "something else": (lambda x, w, s: _uniform([4]), [""]),
    "kept": (lambda x, w, s: _kept.assign(_uniform([4])), ["is kept in a variable"]),
    "function": (_function, ["decides alone", ""]),
    "branch": (_branch, ["decides what the step does"]),
    "branch in a loop": (_branch_in_loop, ["decides what the step does"]),
    "rounds of a loop": (_loop, ["", "decides what the step does", ""]),
    "branch on samples": (_branch_on_samples, [""]),
    "gradients": (_gradients, ["", "is one for the whole batch"]),
}
_kept: Any = None


def _uniform(shape: list[int]) -> Any:
    return tf.random.uniform(shape)


def _normal_like(x: Any) -> Any:
    return tf.random.normal(tf.shape(x))


@pytest.mark.parametrize("batch", [ROWS, None])
@pytest.mark.parametrize("kind", STEPS)
def test_what_is_shared(kind: str, batch: int | None) -> None:
    from npu_device._src.training.fit.randomness import draws_of

    global _kept
    _kept = tf.Variable(tf.zeros([4]))
    step, expected = STEPS[kind]
    found: list[str] = []

    @tf.function
    def trace(data: Any, weight: Any, state: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        share = data[:ROWS] if batch else data[: tf.shape(data)[0] // 2]
        first = len(graph.get_operations())
        result = step(share, weight, state)
        for draw in draws_of(graph, first, [share], {(2, 2)}):
            found.append("decides alone" if draw.decides_alone else draw.shared)
        return result

    specs = [tf.TensorSpec([batch and 2 * batch, 2]), tf.TensorSpec([2, 2]), tf.TensorSpec([2], tf.int32)]
    trace.get_concrete_function(*specs)
    assert found == expected
