"""``npurun speed``: a script with a known ratio, what is said of given times, and scripts that can't be measured."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from launcher import npurun, script, start

from npu_device._src.speed import outcome
from npu_device._src.speed.timed_process import (
    TRACED,
    Setup,
    TimedProcess,
    Times,
    save_memory,
    save_times,
)
from npu_device.launch import speed

pytestmark = pytest.mark.xdist_group("waiting")

# A step waits for each of its samples, so that two ranks take half of the time.
LOOP = """
import time
import tensorflow as tf, npu_device as npu
npu.open().as_default()
weight = tf.Variable(1.0)
optimizer = tf.keras.optimizers.SGD(0.1)
npu.distribute.broadcast([weight])
dataset = tf.data.Dataset.from_tensor_slices(tf.ones([8])).repeat(1000)
dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, 8)
for samples in dataset.batch(batch):
    time.sleep(0.025 * len(samples))
    with tf.GradientTape() as tape:
        loss = weight * tf.reduce_mean(samples)
    [gradient] = npu.distribute.all_reduce(tape.gradient(loss, [weight]))
    optimizer.apply_gradients([(gradient, weight)])
"""
# The same in fit. The layer, not the data, takes the time.
FIT = """
import time
import numpy as np, tensorflow as tf
class Slow(tf.keras.layers.Layer):
    def call(self, x):
        def wait(x):
            time.sleep(0.025 * len(x))
            return x
        waited = tf.numpy_function(wait, [x], tf.float32)
        waited.set_shape(x.shape)
        return waited
inputs = tf.keras.Input((4,))
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(Slow()(inputs)))
model.compile("sgd", "mse")
model.fit(np.ones([800, 4], "float32"), np.ones([800, 1], "float32"), batch_size=8, epochs=100, verbose=0)
"""


@pytest.mark.parametrize(
    ("source", "options", "legacy"),
    [
        (LOOP, (), "0"),
        pytest.param(LOOP, (), "1", marks=pytest.mark.full),
        pytest.param(FIT, ("--replicate",), "0", marks=pytest.mark.full),
        pytest.param(FIT, ("--replicate",), "1", marks=pytest.mark.full),
    ],
    ids=["loop", "loop of tf-keras", "fit", "fit of tf-keras"],
)
def test_two_ranks_that_need_half_of_the_time_are_faster(
    source: str, options: tuple[str, ...], legacy: str, tmp_path: Path
) -> None:
    words = [
        "-n",
        "2",
        "--steps",
        "3",
        "--bind-to",
        "core",
        "--json",
        *options,
        script(tmp_path, source),
    ]
    done = npurun("speed", *words, limit=300.0, TF_USE_LEGACY_KERAS=legacy)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    single, both = report["speedups"]
    assert (single["ranks"], both["ranks"]) == (1, 2)
    assert 1.2 < both["ratio"] < 2.1 and both["verdict"] == "faster"
    assert single["rounds"] >= outcome.LEAST_ROUNDS
    assert min(single["memory"], both["memory"]) > 50 << 20
    assert set(both["parts"]) == {"input", "computing", "update", "communication", "waiting"}
    if options:
        assert report["batch"] == "the global batch is the same"
        assert single["samples_per_second"] == pytest.approx(
            8 * single["steps_per_second"], rel=0.1
        )


def measured(directory: Path, ratios: list[float], rows: tuple[int, int] = (80, 40)) -> Any:
    """Return the outcome of rounds in which one process took a second for 10 steps, and two ranks ``1 / ratio``."""
    process = TimedProcess(str(directory), 10)
    for number, ratio in enumerate([1.0, *ratios]):
        name = str(number) if number else TRACED
        for ranks, seconds, counted in ((1, 1.0, rows[0]), (2, 1 / ratio, rows[1])):
            for rank in process.run_of(Setup(ranks), name):
                rank.folder.mkdir(parents=True)
                save_times(rank, Times(10, seconds, counted))
            save_memory(rank, ranks << 30)
    return outcome.outcome(process, [Setup(1), Setup(2)])


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.3, 1.1, 1.2, 1.4, 1.2], "faster"),
        ([0.8, 0.7, 0.9, 0.8, 0.8], "slower"),
        ([1.3, 0.9, 1.2, 1.4, 1.2], ""),
        ([1.3, 1.2, 1.2, 1.4], ""),  # too few rounds
        ([1.3, 0.9, 1.2, 1.4, 1.2, 1.3, 1.2, 1.3], "faster"),  # one round is an outlier
    ],
)
def test_a_verdict_needs_five_rounds_whose_spread_is_on_one_side(
    ratios: list[float], verdict: str, tmp_path: Path
) -> None:
    line = measured(tmp_path, ratios).speedups[1]
    assert line.verdict == verdict
    assert line.low <= line.ratio <= line.high


@pytest.mark.parametrize(
    ("rows_of_rank", "speedup", "batch"),
    [
        (40, 1.5, "the global batch is the same"),
        (80, 3.0, "the batch is per rank, so that N ranks train N times as many samples in a step"),
    ],
)
def test_a_batch_per_rank_counts_for_each_rank(
    rows_of_rank: int, speedup: float, batch: str, tmp_path: Path
) -> None:
    found = measured(tmp_path, [1.5] * 5, (80, rows_of_rank))
    assert found.batch == batch and found.speedups[1].ratio == pytest.approx(speedup)
    assert f"npurun -n 2: {speedup:.2f} times as fast as one process" in outcome.text(found, 10)


def test_batches_that_differ_are_a_problem(tmp_path: Path) -> None:
    assert "have 26 rows a step" in measured(tmp_path, [1.5] * 5, (80, 130)).problem


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (
            LOOP.replace("repeat(1000)", "repeat(6)"),
            (),
            "as one process, the script ended before it had made 3 steps after its first ones",
        ),
        pytest.param(
            f"{LOOP}    if npu.distribute.size() == 2: raise ValueError('no')",
            (),
            "as 2 ranks, the script failed with exit code 1",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "import time, tensorflow\ntime.sleep(100)",
            ("--minutes", "0.2"),
            "made no steps of a Keras optimizer",
            marks=pytest.mark.full,
        ),
    ],
    ids=["ends early", "fails", "no steps"],
)
def test_scripts_that_cannot_be_measured(
    source: str, options: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    words = ["-n", "2", "--steps", "3", *options, script(tmp_path, source)]
    done = npurun("speed", *words, limit=100.0)
    assert done.returncode == 3 and expected in done.stderr.decode()


@pytest.mark.full
def test_a_number_of_ranks_that_cannot_divide_the_batch_is_left_out(tmp_path: Path) -> None:
    words = ["-n", "2,3", "--steps", "3", script(tmp_path, LOOP)]
    done = npurun("speed", *words, limit=100.0)
    assert "not measured on 3 ranks: they can't divide the batch" in done.stdout.decode()
    assert done.returncode == 0 and "faster" in done.stdout.decode()


@pytest.mark.full
def test_ctrl_c_prints_the_table_so_far(tmp_path: Path) -> None:
    launch = start("speed", "-n", "2", "--steps", "3", script(tmp_path, LOOP))
    assert launch.stderr is not None and launch.stdout is not None
    for line in launch.stderr:
        if b"2 ranks, round 2" in line:
            break
    launch.send_signal(signal.SIGINT)
    table = launch.stdout.read().decode()
    launch.stderr.close()
    launch.stdout.close()
    assert launch.wait(30) == 130
    assert "medians of 2 rounds" in table and re.search(r"^ +2 .* undecided", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: script"),
        (["no_such.py"], "no such script: no_such.py"),
        (["-n", "1", "x.py"], "must name a number of ranks above 1, such as 1,2,4"),
        (["-n", "2,x", "x.py"], "is not a whole number of at least 1"),
        (["--minutes", "0", __file__], "must be above 0"),
        (["--hosts", "a,b", __file__], "speed runs on this host only"),
        (["-n", "100000", __file__], "need more memory than"),
    ],
)
def test_wrong_usage(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        speed.main(arguments)
    assert ended.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.split())
