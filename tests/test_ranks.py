"""Pieces for custom training loops: who is who, objects, waiting, averages by weight, and metrics of all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pool import Pool

import npu_device as npu


def body_objects(root: int) -> Any:
    rank = npu.distribute.rank()
    small = npu.distribute.broadcast_object({"rank": rank}, root)
    large = npu.distribute.broadcast_object(np.full([300_000], rank), root)
    with pytest.raises(ValueError, match="root_rank 9"):
        npu.distribute.broadcast_object(1, 9) if npu.distribute.size() > 1 else _raise()
    assert npu.distribute.gather_object({"rank": rank}) == [{"rank": each} for each in range(npu.distribute.size())]
    assert (npu.distribute.local_rank(), npu.distribute.local_size()) == (rank, npu.distribute.size())
    return rank, npu.distribute.size(), npu.distribute.is_main(), small, set(large.tolist())


def _raise() -> None:
    raise ValueError("root_rank 9")


@pytest.mark.both_backends
def test_objects(ranks: Pool, size: int) -> None:
    root = size - 1
    for rank, found in enumerate(ranks.run(body_objects, root)):
        assert found == (rank, size, rank == 0, {"rank": root}, {root})


def body_zero_first(directory: str) -> Any:
    path = Path(directory) / "prepared"
    with npu.distribute.rank_zero_first() as main:
        if main:
            time.sleep(0.3)
            path.write_text("ready")
        return main, path.read_text()


def test_rank_zero_first(ranks: Pool, size: int, tmp_path: Path) -> None:
    assert ranks.run(body_zero_first, str(tmp_path)) == [(rank == 0, "ready") for rank in range(size)]


def body_zero_fails() -> str:
    try:
        with npu.distribute.rank_zero_first() as main:
            if main:
                raise OSError("disk full")
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_rank_zero_fails_first(several_ranks: Pool) -> None:
    first, *others = several_ranks.run(body_zero_fails)
    assert first == "OSError: disk full"
    for rank, text in enumerate(others, 1):
        assert text.startswith(f"RuntimeError: rank {rank}: rank 0 failed in")
        assert "OSError: disk full" in text


def body_weighted(graph: bool) -> Any:
    rank = npu.distribute.rank()

    def mean(weight: Any) -> Any:
        values = {"loss": tf.constant(float(rank)), "rest": [tf.fill([70_000], 2.0 * rank), None]}
        return npu.distribute.weighted_mean(values, weight)

    if npu.distribute.size() > 1:
        with pytest.raises(ValueError, match=f"rank {rank}: weighted_mean was given the weight -1; expected 0 or more"):
            mean(-1)
    found = (tf.function(mean) if graph else mean)(tf.constant(rank + 1))
    return float(found["loss"]), float(found["rest"][0][-1]), found["rest"][1]


@pytest.mark.both_backends
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_weighted_mean(ranks: Pool, size: int, graph: bool) -> None:
    expected = sum(rank * (rank + 1) for rank in range(size)) / sum(rank + 1 for rank in range(size))
    for loss, last, none in ranks.run(body_weighted, graph):
        assert loss == pytest.approx(expected)
        assert last == pytest.approx(2 * expected)
        assert none is None


def body_weighted_numbers() -> list[Any]:
    rank = npu.distribute.rank()
    values = [tf.constant(10 * (rank + 1)), 7, tf.constant(0.1, tf.float64)]
    found = npu.distribute.weighted_mean(values, rank + 1)
    with pytest.raises(ValueError, match=r"a weight of shape \(1,\); expected a scalar"):
        npu.distribute.weighted_mean(1.0, [2.0])
    return [float(value) for value in found]


def test_weighted_mean_of_integers_and_doubles(several_ranks: Pool) -> None:
    weights = range(1, several_ranks.size + 1)
    tens = 10 * sum(weight**2 for weight in weights) / sum(weights)
    for found in several_ranks.run(body_weighted_numbers):
        assert found == pytest.approx([tens, 7, 0.1], rel=1e-14)


def body_metrics() -> Any:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    random = np.random.default_rng(1)
    truth, guess = random.integers(0, 2, 97).astype(np.float32), random.random(97).astype(np.float32)
    metrics = [tf.keras.metrics.AUC(name="auc"), tf.keras.metrics.Mean(name="mean")]
    alone = [tf.keras.metrics.AUC(name="auc"), tf.keras.metrics.Mean(name="mean")]
    mine = slice(rank, None, size)
    for each, part in ((metrics, mine), (alone, slice(None))):
        each[0].update_state(truth[part], guess[part])
        each[1].update_state(guess[part])
    before = float(metrics[1].result())
    results = npu.distribute.metric_results(metrics)
    again = npu.distribute.metric_results(metrics)
    assert float(metrics[1].result()) == before
    assert results == again
    with pytest.raises(ValueError, match=r"several metrics of one name \(mean, mean\)"):
        npu.distribute.metric_results([metrics[1], alone[1]])
    return results, {metric.name: float(metric.result()) for metric in alone}


def test_metrics_of_all_ranks(keras_ranks: Pool) -> None:
    for results, alone in keras_ranks.run(body_metrics):
        assert results == pytest.approx(alone, rel=1e-5)
