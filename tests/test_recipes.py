"""The scripts of ``examples/recipes`` and ``examples/keras_fit``, unedited, on one process and on 2 ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from caught_messages import warnings_of_package
from pool import Pool
from rank_comparison import TOLERANCE, compare, same_bits

import npu_device as npu

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.slow


def run_example(name: str, *arguments: str) -> Any:
    import runpy

    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")["result"]
    finally:
        sys.argv = before


def body_recipe(name: str, directory: str = "") -> Any:
    if name != "keras_fit":
        with warnings_of_package() as texts:
            result = run_example(f"recipes/{name}.py")
        assert not any("a new JobCheckpoint handles" in text for text in texts), texts
        return result
    place = f"{directory}/{npu.distribute.size()}"
    stopped = run_example("keras_fit/train.py", "--directory", place, "--stop_after", "2")
    resumed = run_example("keras_fit/train.py", "--directory", place, "--epochs", "5")
    assert stopped["epochs"] == [0, 1] and resumed["epochs"][0] == 2 and resumed["accuracy"] > 0.9
    return {**resumed, "stopped": stopped}


@pytest.mark.parametrize(
    "name",
    [
        *("batch_norm", "custom_loop", "keras_fit", "memory_bank", "search"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("contrastive", "data", "gan")),
    ],
)
def test_a_recipe_is_trained_as_one_process(
    keras_two_ranks: Pool, keras_single: Pool, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    # The some two hundred steps of keras_fit let rounding grow.
    tolerance = 2e-3 if name == "keras_fit" else TOLERANCE
    compare(
        keras_two_ranks, keras_single, body_recipe, name, directory=tmp_path, tolerance=tolerance
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "figure"),
    [("resuming", "equal"), pytest.param("resuming_fit", "equal", marks=pytest.mark.full)],
)
def test_recipe_that_says_how_good_it_is(keras_two_ranks: Pool, name: str, figure: str) -> None:
    """Resumed trainings end with equal bits."""
    pytest.importorskip("sklearn")
    results = keras_two_ranks.run(body_recipe, name)
    same_bits(*results)
    assert results[0][figure] > 0.9
