"""What layers hold outside variables: vocabularies work as on one process, and must be the same on all ranks."""

from __future__ import annotations

import lookup_bodies as bodies
import pytest
from pool import Pool
from test_replicate import same


@pytest.mark.slow
def test_preprocessing_inside_a_model(several_keras_ranks: Pool, keras_single: Pool) -> None:
    [alone] = keras_single.run(bodies.body_preprocessing)
    for rank in several_keras_ranks.run(bodies.body_preprocessing):
        same(rank, alone)


@pytest.mark.parametrize(
    ("kind", "how", "name", "attribute"),
    [
        ("StringLookup, adapted", "fit", "adapted", "vocabulary"),
        ("Normalization, adapted", "fit", "adapted", "mean"),
        ("Discretization, adapted", "fit", "adapted", "bin_boundaries"),
        ("table", "fit", "own_table", "table"),
        ("constant", "fit", "projection", "matrix"),
        pytest.param("StringLookup, adapted", "broadcast", "adapted", "vocabulary", marks=pytest.mark.only_keras("2")),
    ],
)
def test_a_difference_names_the_layer(
    several_keras_ranks: Pool, kind: str, how: str, name: str, attribute: str
) -> None:
    parts = f"layer {name!r}", f"{attribute!r}", "rank 0 on host", "rank 1 on host", "before they are divided"
    for text in several_keras_ranks.run(bodies.body_different, kind, how):
        for part in parts:
            assert part in text


@pytest.mark.parametrize("kind", ["MirroredStrategy", "OneDeviceStrategy"])
def test_a_model_of_a_strategy(several_keras_ranks: Pool, kind: str) -> None:
    for text in several_keras_ranks.run(bodies.body_strategy, kind):
        if kind == "OneDeviceStrategy":
            assert text == "trained"
        else:
            assert "'of_a_scope' was made under MirroredStrategy" in text and "outside strategy.scope()" in text
