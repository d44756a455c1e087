"""Whole scripts in the manner of ported ones, unedited on one process and on two: two ranks train what one does.

The scripts are in ``scripts/``; each leaves what it has to say in ``result``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool import Pool

Run = Callable[..., "tuple[Any, list[Any]]"]


def body_script(name: str, *arguments: str) -> Any:
    import os
    import runpy
    import sys

    import npu_device as npu
    from npu_device._src.gradients import split_strategy

    before = sys.argv, dict(os.environ)
    sys.argv = [name, *arguments]
    try:
        return runpy.run_path(str(Path(__file__).parent / "scripts" / name), run_name="__main__")["result"]
    finally:
        sys.argv = before[0]
        split_strategy._strategies.clear()  # a script ends with its process, but for the ones here
        assert npu.open().worker_id == int(os.environ.get("RANK_ID", "0"))


def _same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second))


@pytest.fixture
def run(keras_single: Pool, keras_two_ranks: Pool) -> Run:
    """Runs a script; its result on one process, and those of two ranks, whose weights are the same bits and close."""

    def both(name: str, *arguments: str) -> tuple[Any, list[Any]]:
        [alone] = keras_single.run(body_script, name, *arguments)
        ranks = keras_two_ranks.run(body_script, name, *arguments)
        for rank in ranks:
            assert _same(rank["weights"], ranks[0]["weights"])
            for mine, its in zip(rank["weights"], alone["weights"]):
                np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4, err_msg=name)
        return alone, ranks

    return both


def test_custom_loop(run: Run) -> None:
    alone, ranks = run("custom_loop.py", "--auto_tune")
    for rank in ranks:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_keras_fit(run: Run) -> None:
    alone, ranks = run("keras_fit.py")
    assert [rank["epochs"] for rank in ranks] == [alone["epochs"]] * 2


@pytest.mark.slow
def test_gan(run: Run) -> None:
    run("gan.py")


@pytest.mark.parametrize("scale", ["0", "128"], ids=["dynamic", "fixed"])
def test_bert_pretraining(run: Run, scale: str) -> None:
    alone, ranks = run("bert_pretraining.py", "--overflow_at", "3", "--loss_scale", scale)
    for found in (alone, *ranks):
        assert found["skipped"] == [3]
        assert found["loss_scale"] == (128.0 if scale == "128" else 2.0**14)


@pytest.mark.slow
def test_transformer(run: Run) -> None:
    alone, ranks = run("transformer.py")
    for rank in ranks:
        np.testing.assert_allclose(rank["norms"], alone["norms"], rtol=1e-4)


def test_evaluation_on_the_first_rank(run: Run) -> None:
    alone, ranks = run("evaluate_on_first.py")
    np.testing.assert_allclose(ranks[0]["scores"], alone["scores"], rtol=1e-4)
    assert [rank["checkpoints"] for rank in ranks] == [3, 0]
