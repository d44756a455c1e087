"""Pieces for custom training loops: who is who, objects, waiting, averages by weight, and metrics of all ranks."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of
from pool import Pool

import npu_device as npu
from npu_device._src.training.opening.current_world import current_world


def body_objects() -> tuple[int, int, bool]:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    assert npu.distribute.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert set(npu.distribute.broadcast_object(np.full([300_000], rank), size - 1).tolist()) == {
        size - 1
    }
    if size > 1:
        assert "root_rank 9" in error_of(npu.distribute.broadcast_object, 1, 9)
        # All ranks together have more rows than 32 bits count, as objects have bytes. These take no memory.
        rows = current_world().gather(tf.zeros([1 << 30, 0], tf.uint8))
        assert rows.shape == (size << 30, 0)
    assert npu.distribute.gather_object({"rank": rank}) == [{"rank": each} for each in range(size)]
    assert (npu.distribute.local_rank(), npu.distribute.local_size()) == (rank, size)
    return rank, size, npu.distribute.is_main()


@pytest.mark.both_engines
def test_an_object_of_each_rank_reaches_all_ranks(ranks: Pool, size: int) -> None:
    assert ranks.run(body_objects) == [(rank, size, rank == 0) for rank in range(size)]


def body_zero_first(directory: str) -> Any:
    path = Path(directory) / "prepared"
    graph = tf.Graph()
    # A call in the graph of a session runs at once, too.
    for context in (graph.as_default(), contextlib.nullcontext()):
        with context:
            with npu.distribute.rank_zero_first() as main:
                if main:
                    time.sleep(0.3)
                    path.write_text("ready")
                found = main, path.read_text()
            npu.distribute.barrier()
            everybodys = npu.distribute.gather_object({"read": path.read_text()})
            assert everybodys == [{"read": "ready"}] * npu.distribute.size()
            if main:
                time.sleep(0.3)
                path.unlink()
            npu.distribute.barrier()
            assert not path.exists()
    assert not graph.get_operations()

    def fails() -> None:
        with npu.distribute.rank_zero_first() as main:
            if main:
                raise OSError("disk full")

    return (*found, error_of(fails))


def test_rank_zero_prepares_before_the_others_read(ranks: Pool, size: int, tmp_path: Path) -> None:
    results = ranks.run(body_zero_first, str(tmp_path))
    assert [result[:2] for result in results] == [(rank == 0, "ready") for rank in range(size)]
    assert results[0][2] == "OSError: disk full"
    for rank, (_, _, text) in enumerate(results[1:], 1):
        assert (
            text.startswith(f"RuntimeError: rank {rank}: rank 0 failed in")
            and "OSError: disk full" in text
        )


def body_weighted(graph: bool) -> Any:
    rank = npu.distribute.rank()

    def mean(weight: Any) -> Any:
        values = {"loss": tf.constant(float(rank)), "rest": [tf.fill([70_000], 2.0 * rank), None]}
        return npu.distribute.weighted_mean(values, weight)

    numbers = [tf.constant(10 * rank), 7, tf.constant(0.1, tf.float64)]
    found = npu.distribute.weighted_mean(numbers, rank + 1)
    if npu.distribute.size() > 1:
        with pytest.raises(
            ValueError,
            match=f"rank {rank}: weighted_mean was given the weight -1; expected 0 or more",
        ):
            mean(-1)
        with pytest.raises(ValueError, match=r"a weight of shape \(1,\); expected a scalar"):
            npu.distribute.weighted_mean(1.0, [2.0])
        has_samples = float(rank > 0)
        nothing_of_rank_0 = npu.distribute.weighted_mean(
            tf.constant(2.0) / has_samples, has_samples
        )
        assert float(nothing_of_rank_0) == 2
    result = (tf.function(mean) if graph else mean)(tf.constant(rank + 1))
    assert result["rest"][1] is None
    return [*map(float, found), float(result["loss"]), float(result["rest"][0][-1])]


@pytest.mark.both_engines
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_a_weighted_mean_counts_each_rank_by_its_weight(
    ranks: Pool, size: int, graph: bool
) -> None:
    mean = sum(rank * (rank + 1) for rank in range(size)) / sum(rank + 1 for rank in range(size))
    for found in ranks.run(body_weighted, graph):
        assert found[:3] == pytest.approx([10 * mean, 7, 0.1], rel=1e-14)
        assert found[3:] == pytest.approx([mean, 2 * mean])


def body_metrics() -> None:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    random = np.random.default_rng(1)
    truth, guess = (
        random.integers(0, 2, 97).astype(np.float32),
        random.random(97).astype(np.float32),
    )
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
    assert results == pytest.approx(
        {metric.name: float(metric.result()) for metric in alone}, rel=1e-5
    )

    class Total(tf.keras.metrics.Metric):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name="total")
            self.total = self.add_weight(name="total", shape=(), initializer="zeros")

        def update_state(self, number: Any) -> None:
            self.total.assign_add(number)

        def result(self) -> Any:
            return self.total

    total = Total()
    total.update_state(1.0 + rank)
    assert npu.distribute.metric_results([total]) == {"total": size * (size + 1) / 2}
    assert float(total.result()) == 1.0 + rank


def test_metrics_of_all_ranks(keras_ranks: Pool) -> None:
    keras_ranks.run(body_metrics)
