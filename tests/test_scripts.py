"""Whole scripts in the manner of ported ones, unedited on one process and on two: two ranks train what one does.

The scripts are in ``scripts/``; each leaves what it has to say in ``result``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool import Pool


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


def _custom_loop(alone: Any, ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def _keras_fit(alone: Any, ranks: list[Any]) -> None:
    assert [rank["epochs"] for rank in ranks] == [alone["epochs"]] * 2


def _skips_an_overflow(alone: Any, ranks: list[Any], scale: float) -> None:
    for found in (alone, *ranks):
        assert found["skipped"] == [3]
        assert found["loss_scale"] == scale


def _transformer(alone: Any, ranks: list[Any]) -> None:
    for rank in ranks:
        np.testing.assert_allclose(rank["norms"], alone["norms"], rtol=1e-4)


def _evaluation_on_the_first_rank(alone: Any, ranks: list[Any]) -> None:
    np.testing.assert_allclose(ranks[0]["scores"], alone["scores"], rtol=1e-4)
    assert [rank["checkpoints"] for rank in ranks] == [3, 0]


_OVERFLOW = "bert_pretraining.py --overflow_at 3 --loss_scale"
CHECKS: dict[str, Callable[[Any, list[Any]], None]] = {
    "custom_loop.py --auto_tune": _custom_loop,
    "keras_fit.py": _keras_fit,
    f"{_OVERFLOW} 0": functools.partial(_skips_an_overflow, scale=2.0**14),
    f"{_OVERFLOW} 128": functools.partial(_skips_an_overflow, scale=128.0),
    "gan.py": lambda alone, ranks: None,
    "transformer.py": _transformer,
    "evaluate_on_first.py": _evaluation_on_the_first_rank,
}


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.full] * each.endswith("128")) for each in CHECKS]
)
def test_two_ranks_train_what_one_process_does(keras_single: Pool, keras_two_ranks: Pool, command: str) -> None:
    [alone] = keras_single.run(body_script, *command.split())
    ranks = keras_two_ranks.run(body_script, *command.split())
    for rank in ranks:
        assert _same(rank["weights"], ranks[0]["weights"])
        for mine, its in zip(rank["weights"], alone["weights"]):
            np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4)
    CHECKS[command](alone, ranks)
