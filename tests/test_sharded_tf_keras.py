"""Updates of tf-keras's optimizers divided among the ranks: the bits of ``test_sharded_optimizer``."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import tensorflow as tf
from caught_messages import warnings_of_package
from divided_bodies import (
    SHAPES,
    assert_divided,
    bits_of,
    body_fit,
    body_same_bits,
    body_saved,
    make_variables,
    train,
    wrap,
)
from pool import Pool

full = pytest.mark.full

NAMES = [
    "plain",
    "momentum",
    "nesterov",
    "adam",
    "amsgrad",
    "adamw",
    "rmsprop",
    "lion",
    "adagrad",
    "adadelta",
    "adamax",
    "ftrl",
    "averages",
    "overwritten",
    "dynamic",
    "npu dynamic",
]


def body_of_many(names: list[str], graph: bool) -> list[tuple[int, list[bytes]]]:
    """Return what ``body_same_bits`` does for each optimizer."""
    return [body_same_bits(name, graph, SHAPES, ["float32"], 1, False) for name in names]


@pytest.mark.parametrize(
    ("count", "names", "graph"),
    [
        (2, ["overwritten", "dynamic"], True),
        *(
            pytest.param(count, NAMES, graph, marks=full)
            for count in (1, 2, 3, 4)
            for graph in (False, True)
        ),
    ],
)
def test_weights_have_the_same_bits(
    pool_with: Callable[..., Pool], count: int, names: list[str], graph: bool
) -> None:
    by_rank = pool_with(count, "2").run(body_of_many, names, graph)
    for name, found in zip(names, zip(*by_rank)):
        assert_divided(list(found), name)


@full
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "without", "sparse"),
    [
        ("momentum", SHAPES, ["float32", "float64", "float16", "bfloat16"], None, True),
        ("adagrad", [(3, 2)], ["float32"], None, False),
        ("adam", [(3, 2), (2,)], ["float32"], 0, False),
        ("overwritten", [(3, 2), (2,)], ["float32"], 1, False),
        ("adam", SHAPES, ["float32"], None, True),
    ],
)
def test_what_is_special_about_variables(
    pool_with: Callable[..., Pool],
    graph: bool,
    name: str,
    shapes: list[tuple[int, ...]],
    dtypes: list[str],
    without: int | None,
    sparse: bool,
) -> None:
    found = pool_with(3, "2").run(body_same_bits, name, graph, shapes, dtypes, without, sparse)
    assert all(weights == found[0][1] for _, weights in found)
    assert sum(slots for slots, _ in found) >= len(shapes)


@full
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("name", "compiled", "built"),
    [
        ("adam", {}, False),
        ("nesterov", {"steps_per_execution": 3}, True),
        ("momentum", {"run_eagerly": True}, False),
        ("overwritten", {}, True),
        ("averages", {"jit_compile": True}, False),
        ("dynamic", {}, False),
        ("npu dynamic", {}, False),
    ],
)
def test_fit_ends_in_the_same_bits(
    pool_with: Callable[..., Pool], name: str, compiled: dict[str, Any], built: bool, count: int
) -> None:
    assert_divided(pool_with(count, "2").run(body_fit, name, compiled, built), name)


@full
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("savers", [[0], [2], [0, 1, 2]])
def test_files_hold_what_they_hold_without(
    pool_with: Callable[..., Pool], tmp_path: Any, savers: list[int], graph: bool
) -> None:
    ranks = pool_with(3, "2")
    assert ranks.run(body_saved, "overwritten", str(tmp_path), savers, graph) == [[]] * 3


def body_undivided() -> list[tuple[list[str], list[bytes]]]:
    """Train with what can't be divided; return the warnings, and the weights."""
    kinds = tf.keras.optimizers
    ends = []
    for optimizer in (kinds.Adafactor(0.1), kinds.Nadam(0.1), kinds.legacy.Adam(0.1)):
        variables = make_variables(SHAPES[:3], ["float32"])
        with warnings_of_package() as heard:
            wrap(optimizer, shard_optimizer=True)
        train(optimizer, variables, False, 2)
        ends.append((list(heard), bits_of(variables)))
    return ends


def test_what_cannot_be_divided_is_not(pool_with: Callable[..., Pool]) -> None:
    found, of_others = pool_with(2, "2").run(body_undivided)
    for kind, (heard, weights), (nothing, others) in zip(
        ("Adafactor", "Nadam", "legacy"), found, of_others
    ):
        assert len(heard) == 1 and kind in heard[0] and "has no effect" in heard[0], heard
        assert not nothing
        assert weights == others
