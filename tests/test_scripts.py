"""Whole scripts in the manner of ported ones, unedited on one process and on two: two ranks train what one does. And
single things that ported scripts in TensorFlow 2 style do.

The scripts are in ``scripts/``; each leaves what it has to say in ``result``.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pool import Pool
from rank_comparison import same_bits

import npu_device as npu
from npu_device._src.gradients import split_strategy


def body_script(name: str, *arguments: str) -> Any:
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        return runpy.run_path(str(Path(__file__).parent / "scripts" / name), run_name="__main__")[
            "result"
        ]
    finally:
        sys.argv = before
        split_strategy.forget_strategies()  # a script ends with its process, but for the ones here
        assert npu.open().worker_id == int(os.environ.get("RANK_ID", "0"))


BERT = "bert_pretraining.py --overflow_at 3"


@pytest.mark.parametrize("command", [BERT, "transformer.py", "evaluate_on_first.py"])
def test_two_ranks_train_what_one_process_does(
    keras_single: Pool, keras_two_ranks: Pool, command: str
) -> None:
    [alone] = keras_single.run(body_script, *command.split())
    ranks = keras_two_ranks.run(body_script, *command.split())
    same_bits(*(rank["weights"] for rank in ranks))
    for rank in ranks:
        for mine, its in zip(rank["weights"], alone["weights"]):
            np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4)
        for alike in {"norms", "scores"} & rank.keys():  # those of rank 0, if only it evaluates
            np.testing.assert_allclose(rank[alike], alone[alike][: len(rank[alike])], rtol=1e-4)
    if command == "evaluate_on_first.py":
        assert [(rank["checkpoints"], len(rank["scores"])) for rank in ranks] == [(3, 3), (0, 0)]
    if command == BERT:
        assert [(rank["skipped"], rank["loss_scale"]) for rank in (alone, *ranks)] == [
            ([3], 2.0**14)
        ] * 3


def body_places() -> list[float]:
    rank = npu.open().worker_id
    metric = tf.keras.metrics.Mean()
    metric.update_state(rank + 1.0)
    found = [npu.distribute.all_reduce(np.float32(rank + 1), "sum")]
    found += npu.distribute.all_reduce([metric.result()], "sum")

    def replica() -> Any:
        return npu.distribute.all_reduce(tf.constant(rank + 1.0), "sum")

    for strategy in (
        tf.distribute.OneDeviceStrategy("CPU:0"),
        tf.distribute.MirroredStrategy(["CPU:0"]),
    ):
        with strategy.scope():
            found.append(strategy.run(replica))
            found.append(tf.function(lambda run=strategy.run: run(replica))())
    thread = threading.Thread(target=lambda: found.append(replica()))
    thread.start()
    thread.join(60)
    return [float(value) for value in found]


def test_wherever_all_reduce_is_called(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(body_places) == [[3.0] * 7] * 2


def body_thrown_away() -> list[float]:
    rank = npu.open().worker_id

    @tf.function
    def step(value: Any) -> Any:
        reduced = npu.distribute.all_reduce([value, value * 2], "sum")
        return reduced[0] if rank else value  # rank 0 looks at none of them

    results = [float(step(tf.constant(rank + 1.0))) for _ in range(3)]
    npu.distribute.all_reduce(tf.constant(1.0))  # nor here
    return [*results, float(npu.distribute.all_reduce(rank + 1.0, "sum"))]


def test_a_result_that_a_rank_throws_away(two_ranks: Pool) -> None:
    assert two_ranks.run(body_thrown_away) == [[1.0, 1.0, 1.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
