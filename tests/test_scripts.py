"""Whole scripts in the manner of ported ones, unedited on one process and on two: two ranks train what one does.

The scripts are in ``scripts/``; each leaves what it has to say in ``result``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import _pool


def body_script(name: str, *arguments: str) -> Any:
    import os
    import runpy
    import sys

    import npu_device as npu
    from npu_device.gradients import split_strategy

    before = sys.argv, dict(os.environ)
    sys.argv = [name, *arguments]
    try:
        return runpy.run_path(str(Path(__file__).parent / "scripts" / name), run_name="__main__")["result"]
    finally:
        sys.argv = before[0]
        split_strategy.clear()  # a script ends with its process, but for the ones here
        assert npu.open().worker_id == int(os.environ.get("RANK_ID", "0"))


def _same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second))


def _run(keras: str, name: str, *arguments: str) -> tuple[Any, list[Any]]:
    """A script's result on one process, and on each of two ranks, whose weights are the same bits and close to it."""
    [alone] = _pool(1, keras).run(body_script, name, *arguments)
    ranks = _pool(2, keras).run(body_script, name, *arguments)
    for rank in ranks:
        assert _same(rank["weights"], ranks[0]["weights"])
        for mine, its in zip(rank["weights"], alone["weights"]):
            np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4, err_msg=name)
    return alone, ranks


def test_custom_loop(keras: str) -> None:
    alone, ranks = _run(keras, "custom_loop.py", "--auto_tune")
    for rank in ranks:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_keras_fit(keras: str) -> None:
    alone, ranks = _run(keras, "keras_fit.py")
    assert [rank["epochs"] for rank in ranks] == [alone["epochs"]] * 2


def test_gan(keras: str) -> None:
    _run(keras, "gan.py")


@pytest.mark.parametrize("scale", ["0", "128"], ids=["dynamic", "fixed"])
def test_bert_pretraining(keras: str, scale: str) -> None:
    alone, ranks = _run(keras, "bert_pretraining.py", "--overflow_at", "3", "--loss_scale", scale)
    for found in (alone, *ranks):
        assert found["skipped"] == [3]
        assert found["loss_scale"] == (128.0 if scale == "128" else 2.0**14)


def test_transformer(keras: str) -> None:
    alone, ranks = _run(keras, "transformer.py")
    for rank in ranks:
        np.testing.assert_allclose(rank["norms"], alone["norms"], rtol=1e-4)


def test_evaluation_on_the_first_rank(keras: str) -> None:
    alone, ranks = _run(keras, "evaluate_on_first.py")
    np.testing.assert_allclose(ranks[0]["scores"], alone["scores"], rtol=1e-4)
    assert [rank["checkpoints"] for rank in ranks] == [3, 0]
