"""Places in which TensorFlow runs calls in no order: a collective there is refused on every rank, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from pool import Pool

import npu_device as npu


def body_unordered(graph: bool) -> dict[str, str]:
    value = tf.constant([1.0, 2.0]) * (npu.distribute.rank() + 1)

    def add(each: Any) -> Any:
        return npu.distribute.all_reduce(each, "sum")

    def jacobian(pfor: bool) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(value)
            result = add(value**2)
        return tape.jacobian(result, value, experimental_use_pfor=pfor)

    def in_scope() -> Any:
        with tf.name_scope("loop_body"):
            return add(value)

    places = {
        "vectorized_map": lambda: tf.vectorized_map(add, value),
        "jacobian": lambda: jacobian(True),
        "map": lambda: next(iter(tf.data.Dataset.range(3).map(lambda each: add(tf.cast(each, tf.float32))))),
        "nested": lambda: next(iter(tf.data.Dataset.range(3).map(tf.function(add)))),
        "map_fn": lambda: tf.map_fn(add, value),
        "jacobian in a loop": lambda: jacobian(False),
        "a scope of that name": in_scope,
    }

    found = {}
    for name, call in places.items():
        try:
            found[name] = str((tf.function(call) if graph else call)().numpy().tolist())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.both_backends
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_collectives_where_calls_have_no_order(several_ranks: Pool, graph: bool) -> None:
    total = sum(range(1, several_ranks.size + 1))
    for rank, found in enumerate(several_ranks.run(body_unordered, graph)):
        assert found.pop("map_fn") == found.pop("a scope of that name") == str([1.0 * total, 2.0 * total])
        weight = 2.0 * several_ranks.size * (rank + 1)
        assert found.pop("jacobian in a loop") == str([[weight, 0.0], [0.0, 2 * weight]])
        for name, text in found.items():
            assert text.startswith("RuntimeError") and "another order on each rank" in text, (name, text)
