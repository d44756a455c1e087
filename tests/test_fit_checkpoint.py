"""``npu.train.FitCheckpoint``: a ``fit`` that was interrupted goes on to the same bits, or says that it doesn't."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import fit_checkpoint_bodies as bodies
import job
import numpy as np
import pytest
from compared import same_bits
from launcher import npurun
from pool import Pool
from test_job_checkpoint import results_of

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import fit_checkpoint_bodies
fit_checkpoint_bodies.main()
"""


def check(results: list[Any], epochs: list[int], kind: str) -> None:
    if kind != "own":  # whose moving averages are those of each rank
        same_bits(*(rank["whole"]["values"] for rank in results))
    for place, rank in enumerate(results):
        whole, parts, ended = rank["whole"], rank["parts"], rank["ended"]
        assert (parts["not_kept"], parts["warnings"]) == ((), [])
        same_bits(whole["values"], parts["values"])
        assert list(whole["logs"]) == [0, 1, 2]
        assert list(parts["logs"]) == epochs
        assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in epochs}
        if ended is not None:
            same_bits(whole["values"], ended["values"])
            assert (ended["not_kept"], list(ended["logs"])) == ((), [2])
            assert ["had ended: its last state" in text for text in ended["warnings"]] == [True] * (place == 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "repeated", "dataset"])
def test_fit_goes_on_to_the_same_bits(keras_ranks: Pool, kind: str, tmp_path: Path) -> None:
    results = keras_ranks.run(bodies.body_same_bits, str(tmp_path / "fit"), kind)
    check(results, [2] if kind == "dataset" else [1, 2], kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "divided", "pipeline"])
def test_each_rank_with_data_of_its_own(keras_two_ranks: Pool, kind: str, tmp_path: Path) -> None:
    check(keras_two_ranks.run(bodies.body_same_bits, str(tmp_path / "fit"), kind), [1, 2], kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed", "says"),
    [("dataset", None, "rank(s) 0, 1 read a different first batch"), ("generator", 3, "its data come from Python")],
)
def test_another_order_is_told(two_ranks: Pool, kind: str, seed: int | None, says: str, tmp_path: Path) -> None:
    results = two_ranks.run(bodies.body_other_data, str(tmp_path / "fit"), kind, seed)
    for rank in results:
        [text] = rank["not_kept"]
        assert says in text and "What to do: " in text
        assert list(rank["logs"]) == [1, 2]
    warning = [text for text in results[0]["warnings"] if "resumed in epoch 2" in text]
    assert len(warning) == 1 and says in warning[0]


@pytest.mark.slow
@pytest.mark.parametrize("keras", [pytest.param("2", marks=pytest.mark.full), "3"], indirect=True)
def test_steps_per_execution_and_metrics(keras_two_ranks: Pool, tmp_path: Path) -> None:
    for result in keras_two_ranks.run(bodies.body_compiled, str(tmp_path / "fit")):
        whole, parts = result["whole"], result["parts"]
        assert result["there"] == ["latest.json", "step-00000010", "step-00000013", "step-00000015"]
        same_bits(whole["values"], parts["values"])
        assert list(parts["logs"]) == [1, 2]
        assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in (1, 2)}
        assert "has other metrics than this fit" in result["error"]


def test_checkpoints_that_this_fit_can_not_use(single: Pool, tmp_path: Path) -> None:
    [texts] = single.run(bodies.body_errors, str(tmp_path / "fit"))
    assert "is not that of a fit" in texts[0]
    assert "is from epoch 2, but this fit has 1" in texts[1]


@pytest.mark.slow
def test_a_killed_rank_and_a_preemption_under_npurun(tmp_path: Path) -> None:
    """Under Keras 3. The job ends with the second, and then goes on."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    restarts = ("--max-restarts", "1", "--restart-backoff", "0.1")
    signals = ("0:0,0:0", f"8:{int(signal.SIGKILL)},1:{int(signal.SIGTERM)}")
    done = npurun("-n", "2", *restarts, str(script), str(tmp_path), "repeated", *signals, limit=120)
    assert done.returncode == 75, done.stderr.decode()
    told = done.stderr.decode()
    assert re.search(r"restart 1 of 1 .*rank 1 on host .*killed by SIGKILL", told), told
    assert re.search(r"stopped on request at step \d+, resumable", told), told
    assert "Traceback" not in told.partition("restart 1 of 1")[2]
    again = job.start_command(tmp_path, 2, [str(script), str(tmp_path), "repeated"], TF_USE_LEGACY_KERAS="0")
    assert [ended.code for ended in job.finish(again, timeout=120)] == [0, 0]
    compare(tmp_path)


def compare(directory: Path) -> None:
    """Compare what the ranks of a job have ended with to their training that nothing interrupted."""
    for one, other in zip(results_of(directory, 2, "whole"), results_of(directory, 2)):
        assert list(one["epochs"]) == [0, 1, 2]
        assert list(other["epochs"]) in ([1, 2], [2])  # a signal takes some of the short steps to reach all ranks
        for name in set(one) - {"epochs"}:
            np.testing.assert_array_equal(one[name], other[name])
