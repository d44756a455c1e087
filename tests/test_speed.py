"""``npurun speed``: a script with a known ratio, what is said of given times, and scripts that can't be measured."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launcher import environment, npurun, script, start

from npu_device._src.machine.topology import Core, Machine, Quota
from npu_device._src.speed import outcome
from npu_device._src.speed.outcome import Run
from npu_device._src.speed.timed_process import (
    TRACED,
    Setup,
    TimedProcess,
    Times,
    load_times,
    save_times,
)
from npu_device._src.trace.records import GradientRecord, Iteration, RankTrace
from npu_device.launch import speed

pytestmark = pytest.mark.xdist_group("waiting")

# A step waits for each of its samples, so that two ranks take half of the time.
LOOP = """
import os, tempfile, time
import tensorflow as tf, npu_device as npu
npu.open().as_default()
# Runs before have left no such folders.
left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("npu_speed_test")]
assert len(left) < npu.distribute.size(), left
tempfile.mkdtemp(prefix="npu_speed_test")
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

# As npurun sets it, which the C library reads when a process starts.
TUNED = """
import os, tensorflow
assert "x86_non_temporal_threshold" in os.environ["GLIBC_TUNABLES"]
"""


@pytest.mark.parametrize(
    ("source", "options", "legacy", "rounds"),
    [
        (LOOP, (), "0", 1),
        pytest.param(LOOP, (), "0", 5, marks=pytest.mark.full),
        pytest.param(LOOP, (), "1", 5, marks=pytest.mark.full),
        pytest.param(FIT, ("--replicate",), "0", 5, marks=pytest.mark.full),
        pytest.param(FIT, ("--replicate",), "1", 5, marks=pytest.mark.full),
    ],
    ids=["loop, one round", "loop", "loop of tf-keras", "fit", "fit of tf-keras"],
)
def test_two_ranks_that_need_half_of_the_time_are_faster(
    source: str, options: tuple[str, ...], legacy: str, rounds: int, tmp_path: Path
) -> None:
    turns = ("--rounds", str(rounds), "--steps", "3")
    path = script(tmp_path, TUNED + source)
    words = ["-n", "2", *turns, "--bind-to", "core", "--json", *options, path]
    done = npurun(
        "speed", *words, limit=300.0, TF_USE_LEGACY_KERAS=legacy, NPU_DEVICE_TUNE_COPIES="on"
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert not list(Path(tempfile.gettempdir()).glob("npu_speed_test*"))
    single, both = report["speedups"]
    assert (single["ranks"], both["ranks"]) == (1, 2)
    assert both["ratio"] > 1 and single["rounds"] >= rounds
    assert both["verdict"] != "slower"
    # Other tests may take the cores.
    if rounds == 1 or report["lost_cores"] < 0.1:
        assert both["verdict"] == ("" if rounds == 1 else "faster")
    assert min(single["memory"], both["memory"]) > 50 << 20
    assert set(both["parts"]) == {"input", "computing", "update", "communication", "waiting"}
    if options:
        assert report["batch"].startswith("the global batch is the same; samples are rows of")
        assert single["samples_per_second"] == pytest.approx(
            8 * single["steps_per_second"], rel=0.1
        )


# It ends with 5 once its steps have not been looked at for as long as a half of those that are timed.
WATCHED = """
import os, threading, time
import tensorflow as tf
class Watched(tf.keras.optimizers.SGD):
    looked_at = 0.0
    @property
    def _iterations(self):
        if threading.current_thread().name == "npu_device-speed":
            now = time.monotonic()
            # What comes once, such as a collection of garbage, is in the first steps.
            if self.counter[0] > 30 and now - self.looked_at > 0.5:
                os._exit(5)
            Watched.looked_at = now
        return self.counter[0]
    @_iterations.setter
    def _iterations(self, counter):
        self.__dict__["counter"] = [counter]
weight = tf.Variable(1.0)
optimizer = Watched(0.1)
while True:
    time.sleep(0.05)
    optimizer.apply_gradients([(tf.ones([]), weight)])
"""


def test_steps_are_looked_at_only_when_there_should_be_enough(tmp_path: Path) -> None:
    done = npurun("speed", "-n", "2", "--rounds", "1", script(tmp_path, WATCHED), limit=120.0)
    assert done.returncode == 3
    assert "failed with exit code 5" in done.stderr.decode()


SHORT_EPOCHS = """
import gc, sys, time
import numpy as np
from npu_device._src.speed import step_clock
from npu_device._src.speed.timed_process import TimedProcess
import tensorflow as tf
keras = tf.keras
process = TimedProcess(sys.argv[1], 6)
process.folder.mkdir(parents=True)
clock = step_clock.StepClock(process)
clock.install(sys.modules[keras.__name__.partition(".")[0]])
class Waits(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
    def on_test_end(self, logs=None):
        time.sleep(0.2)
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(5.0 * (epoch == 0))
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones([16, 4], "float32"), np.ones([16, 1], "float32")
# Only who asks for it collects garbage now: the clock, before the timed steps.
gc.disable()
collections = gc.get_stats()[2]["collections"]
model.fit(x, y, batch_size=4, epochs=14, verbose=0, validation_data=(x, y), callbacks=[Waits()])
assert gc.get_stats()[2]["collections"] == collections + 1
"""


@pytest.mark.parametrize(
    "legacy", ["0", pytest.param("1", marks=pytest.mark.full)], ids=["Keras 3", "tf-keras"]
)
def test_short_epochs_are_timed_whole_but_for_the_first_ones(legacy: str, tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path, SHORT_EPOCHS), str(tmp_path)]
    variables = environment(TF_USE_LEGACY_KERAS=legacy)
    subprocess.run(command, env=variables, check=True, timeout=100)
    times = load_times(TimedProcess(str(tmp_path), 6))
    assert times is not None and times.steps >= 8 and times.steps % 4 == 0
    # An epoch waits for four steps and a validation, the first one for five seconds more.
    assert times.seconds / times.steps > 0.07
    assert times.seconds < 5


START = TimedProcess("", 10)


def runs_of(
    ratios: list[float], rows: tuple[int | None, int | None] = (80, 40), lost_cores: float = 0.0
) -> dict[Setup, list[Run]]:
    """Return a traced run and others, in which one process took a second for 10 steps, and two ranks ``1 / ratio``."""
    single = Run([Times(10, 1.0, rows[0])], lost_cores, False, None)
    both = [
        Run([Times(10, 1 / ratio, rows[1])] * 2, lost_cores, True, None) for ratio in (1.0, *ratios)
    ]
    # The time has ended in a round.
    return {Setup(1): [single] * (len(both) + 1), Setup(2): both}


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
    ratios: list[float], verdict: str
) -> None:
    line = outcome.outcome(START, runs_of(ratios), {}).speedups[1]
    assert line.verdict == verdict
    assert line.low <= line.ratio <= line.high


@pytest.mark.parametrize(
    ("ratios", "is_settled"),
    [
        ([1.30, 1.32, 1.35, 1.38, 1.40], True),
        ([1.30, 1.32, 1.35, 1.38, 1.50], False),  # on one side of 1, but wide
        ([1.30, 1.30, 1.32, 1.35, 1.38, 1.40, 1.45, 1.60], True),  # wider, after more rounds
        ([0.98, 0.99, 1.00, 1.01, 1.02], False),  # narrow, but undecided
        ([1.3, 0.9], True),  # with so few rounds, nothing is decided anyway
    ],
)
def test_rounds_go_on_until_the_spread_is_on_one_side_and_narrow(
    ratios: list[float], is_settled: bool
) -> None:
    assert outcome.outcome(START, runs_of(ratios), {}).speedups[1].is_settled == is_settled


@pytest.mark.parametrize(
    ("ratio", "lost_cores", "verdict"),
    [
        (1.3, 0.05, "faster"),
        (1.3, 0.5, ""),
        (1.7, 0.5, "faster"),
        (0.8, 0.05, "slower"),
        (0.4, 0.5, ""),
    ],
)
def test_what_other_programs_may_have_decided_is_undecided(
    ratio: float, lost_cores: float, verdict: str
) -> None:
    found = outcome.outcome(START, runs_of([ratio] * 5, lost_cores=lost_cores), {})
    assert found.speedups[1].verdict == verdict
    assert ("other programs took" in outcome.text(found, 10)) == (lost_cores == 0.5)


@pytest.mark.parametrize(
    ("rows_of_rank", "speedup", "batch"),
    [
        (40, 1.5, "the global batch is the same"),
        (80, 3.0, "the batch is per rank, so that N ranks train N times as many samples in a step"),
    ],
)
def test_a_batch_per_rank_counts_for_each_rank(
    rows_of_rank: int, speedup: float, batch: str
) -> None:
    found = outcome.outcome(START, runs_of([1.5] * 5, (80, rows_of_rank)), {})
    assert found.batch.startswith(batch) and found.speedups[1].ratio == pytest.approx(speedup)
    assert f"npurun -n 2: {speedup:.2f} times as fast as one process" in outcome.text(found, 10)


def test_batches_that_differ_are_a_problem() -> None:
    found = outcome.outcome(START, runs_of([1.5] * 5, (80, 130)), {})
    assert "have 26 rows a step" in found.problem


def test_ranks_that_do_not_train_together_are_a_problem() -> None:
    runs = runs_of([1.5] * 5)
    assert not outcome.outcome(START, runs, {}).problem
    traced, *others = runs[Setup(2)]
    slow, fast = Times(10, 1.0, 40), Times(13, 1.0, 40)
    apart = traced._replace(times=[slow, fast])
    # A single run may have been disturbed.
    runs[Setup(2)] = [apart, *others]
    assert not outcome.outcome(START, runs, {}).problem
    runs[Setup(2)] = [apart] * 6
    problem = outcome.outcome(START, runs, {}).problem
    assert "the 2 ranks make different numbers of steps in the same time" in problem
    runs[Setup(2)][1] = apart._replace(lost_cores=0.5)
    assert not outcome.outcome(START, runs, {}).problem
    runs[Setup(2)] = [traced._replace(joined=False)]
    assert "doesn't open npu_device on 2 ranks" in outcome.outcome(START, runs, {}).problem


def traced_run(directory: Path, engine: str) -> Run:
    """Return a run of two ranks that reduce with an engine, each on a host of its own."""
    processes = TimedProcess(str(directory), 10).run_of(Setup(2), TRACED)
    # In milliseconds: 10 of input, 60 of computing, 20 of communication, 10 of the update.
    iterations = [
        Iteration(
            number,
            begin + 1e4,
            begin + 7e4,
            begin + 1e5,
            ((begin + 7e4, begin + 9e4),),
            (begin + 7e4,) * 2,
            begin,
        )
        for number, begin in enumerate(1e5 * step for step in range(9))
    ]
    # So many that the network isn't the limit.
    gradients = (GradientRecord("w", "float32", 5 << 20),) * 2
    for rank in processes:
        rank.folder.mkdir(parents=True)
        save_times(rank, Times(10, 1.0, 40))
        head = RankTrace(
            rank.rank,
            2,
            f"host{rank.rank}",
            1,
            0.0,
            0.0,
            "model",
            engine,
            "world",
            gradients,
            ((0, 1),),
        )
        lines = [head.header(), *(iteration.__dict__ for iteration in iterations)]
        rank.trace_file.parent.mkdir(parents=True)
        rank.trace_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = outcome.run_of(processes, 0.0)
    assert run is not None
    return run


PIPELINE = ("npu.distribute.pipeline", "1.05")
SHARD = ("--shard-optimizer", "1.05")
SPLIT = ("NPU_DEVICE_SPLIT", "1.18")


@pytest.mark.parametrize(
    ("engine", "remedies"),
    [
        ("tensorflow", [PIPELINE, SPLIT, ("NPU_DEVICE_BACKEND", "1.12")]),
        ("tcp", [PIPELINE, SHARD, SPLIT]),
    ],
)
def test_remedies_are_for_parts_that_take_time(
    engine: str, remedies: list[tuple[str, str]], tmp_path: Path
) -> None:
    runs = runs_of([1.5] * 5)
    runs[Setup(2)][0] = traced_run(tmp_path, engine)
    found = outcome.outcome(START, runs, {})
    assert found.speedups[1].parts == pytest.approx(
        {"input": 10, "computing": 60, "update": 10, "communication": 20, "waiting": 0}
    )
    choice, *advice = found.advice
    assert choice == "npurun -n 2: 1.50 times as fast as one process"
    shown = [(re.split("[,=( ]", line)[0], line.partition("up to ")[2][:4]) for line in advice]
    assert shown == remedies
    # None from times that other programs have changed.
    disturbed = runs_of([1.9] * 5, lost_cores=0.5)
    disturbed[Setup(2)][0] = runs[Setup(2)][0]
    [only_choice] = outcome.outcome(START, disturbed, {}).advice
    assert only_choice.startswith("npurun -n 2: 1.90 times")
    # Each only where it isn't done yet.
    divided = TimedProcess("", 10, shard_optimizer=True, replicates=True)
    choice, *others = outcome.outcome(divided, runs, {}).advice
    assert choice.startswith("npurun -n 2 --shard-optimizer --replicate: 1.50 times")
    assert others == [line for line in advice if "--shard" not in line]


def test_bound_ranks_are_proposed_where_they_are_the_fastest() -> None:
    runs = runs_of([1.3] * 5)
    runs[Setup(2, "auto")] = [Run([Times(10, 0.5, 40)] * 2, 0.0, True, None)] * 6
    found = outcome.outcome(START, runs, {})
    assert found.advice[0] == "npurun -n 2 --bind-to auto: 2.00 times as fast as one process"
    found = outcome.outcome(START, runs, {"2 bound": "no time"})
    assert found.advice[0] == "npurun -n 2: 1.30 times as fast as one process"
    assert "not measured on 2 bound ranks: no time" in outcome.text(found, 10)


def test_with_horovod_the_batch_is_per_rank_where_no_model_is_called() -> None:
    start = TimedProcess("", 10, horovod=True)
    found = outcome.outcome(start, runs_of([0.8] * 5, (None, None)), {})
    assert "taken to be per rank" in found.batch and found.speedups[1].ratio == pytest.approx(1.6)
    assert found.advice == ["npurun -n 2 --horovod: 1.60 times as fast as one process"]


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (
            LOOP.replace("repeat(1000)", "repeat(6)"),
            (),
            "as one process, the script ended before 3 steps of a Keras optimizer could be timed",
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
        pytest.param(
            FIT.replace("0.025", "0.001"),
            (),
            "the script doesn't open npu_device on 2 ranks",
            marks=pytest.mark.full,
        ),
    ],
    ids=["ends early", "fails", "no steps", "each for itself"],
)
def test_scripts_that_cannot_be_measured(
    source: str, options: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    words = ["-n", "2", "--steps", "3", *options, script(tmp_path, source)]
    done = npurun("speed", *words, limit=100.0)
    assert done.returncode == 3 and expected in done.stderr.decode()


@pytest.mark.full
def test_a_number_of_ranks_that_cannot_divide_the_batch_is_left_out(tmp_path: Path) -> None:
    words = ["-n", "2,3", "--steps", "3", "--rounds", "1", script(tmp_path, LOOP)]
    done = npurun("speed", *words, limit=100.0)
    assert "not measured on 3 ranks: they can't divide the batch" in done.stdout.decode()
    assert done.returncode == 0 and re.search(rb"^ +2 ", done.stdout, re.MULTILINE)


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
        (["--minutes", "0", __file__], "'0' is not a number of minutes above 0"),
        (["--hosts", "a,a", __file__], "a is listed twice"),
        (["--hosts", "a,b", "-n", "3", __file__], "-n 3: must be a multiple of the 2 hosts"),
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


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--shard-optimizer", "--bind-to", "core")])
def test_ranks_on_hosts_are_a_job_and_one_process_is_here(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    hosts = ("--hosts", "localhost:1,127.0.0.1:1")
    words = [*hosts, "--steps", "3", "--rounds", "1", *options, "--json"]
    done = npurun("speed", *words, script(tmp_path, LOOP), limit=300.0)
    assert done.returncode == 0, done.stderr.decode()
    single, both = json.loads(done.stdout)["speedups"]
    assert (single["ranks"], both["ranks"]) == (1, 2)
    assert both["ratio"] > 1 and both["memory"] > single["memory"] and both["parts"]["computing"]


@pytest.mark.full
def test_a_rank_on_a_host_that_fails_is_told(tmp_path: Path) -> None:
    failing = f"{LOOP}    if npu.distribute.rank() == 1: raise ValueError('not here')"
    words = ["--hosts", "localhost:1,127.0.0.1:1", "--steps", "3", script(tmp_path, failing)]
    done = npurun("speed", *words, limit=100.0)
    assert done.returncode == 3
    assert "as 2 ranks, the script failed with exit code 1" in done.stderr.decode()
    assert "ValueError: not here" in done.stderr.decode()


def test_a_program_called_speed_still_runs(tmp_path: Path) -> None:
    program = tmp_path / "speed"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    assert b"mine" in npurun("./speed", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        ([], [1, 2, 4, 8]),
        ([("a", 4), ("b", 4)], [1, 2, 4, 8]),
        ([("a", None), ("b", None), ("c", None)], [1, 3]),
        ([("a", 6), ("b", 6)], [1, 2, 4, 8, 12]),
    ],
)
def test_numbers_of_ranks_to_try(
    slots: list[tuple[str, int | None]], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "usable_memory", lambda: 64 << 30)
    cores = [Core(number, (number,), 0, number // 4, 0) for number in range(8)]
    assert speed.sizes_to_measure(Machine(tuple(cores)), slots) == sizes
    # A container of three CPUs has two of those numbers.
    quota = Quota(2.5, "")
    assert speed.sizes_to_measure(Machine(tuple(cores), quota), []) == [1, 2]
