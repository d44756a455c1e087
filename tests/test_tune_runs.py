"""Tuning for real: ``aoe_mode`` 4 on running ranks, and ``npurun --tune`` with a script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from launcher import NPURUN, environment, is_running, wait_for_files, wait_until
from pool import Pool
from test_tune import COST, write_trace

from npu_device._src.gradients.saved_splits import load_all
from npu_device._src.gradients.split_strategy import cut_by_default
from npu_device._src.tuning import __main__ as npu_tune
from npu_device._src.tuning.cost_model import MEASURED_FILE, CostModel, measured_in
from npu_device._src.tuning.trials import FIRST
from npu_device.launch import arguments
from npu_device.launch import tune as launch_tune


def measured(directory: str) -> str:
    """Do what ``aoe_mode`` 4 does when the device is opened."""
    import atexit

    from npu_device._src.collectives.job import current
    from npu_device._src.tuning import aoe

    running = current()
    assert running is not None
    try:
        return str(aoe.begin(running, Path(directory), largest=1_000_000).output)
    finally:
        atexit.unregister(aoe.finish)


@pytest.mark.slow
@pytest.mark.both_backends
def test_aoe_mode_4_measures_first_and_predicts_in_the_end(
    two_ranks: Pool, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from npu_device._src.tuning import aoe

    (output,) = set(two_ranks.run(measured, str(tmp_path)))
    work = tmp_path / "npu_tune"
    assert Path(output) == work / FIRST
    cost = CostModel.read(work / MEASURED_FILE)
    assert 0 < cost.beta < 1e-7
    assert 0 <= cost.alpha < 0.1
    assert cost.beta_error > 0
    # In shared memory gradients go into the ring one by one.
    assert 0 <= cost.pack < 1e-7
    assert backend == "tensorflow" or cost.pack == 0

    monkeypatch.setenv("NPU_DEVICE_SPLIT_DIR", str(tmp_path / "splits"))
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    write_trace(work / FIRST)
    aoe.finish(work, COST)
    (split,) = load_all()
    assert not split.checked
    assert f"set_split_strategy_by_idx({list(split.ends)})" in caplog.text
    assert (tmp_path / "CPU_gradient_fusion.json").is_file()

    aoe.finish(tmp_path, COST)
    assert "no split was found: there is no trace" in caplog.text


SCRIPT = """\
    import tensorflow as tf
    import npu_device as npu

    npu.open().as_default()
    tf.random.set_seed(1)
    layers = [tf.Variable(tf.random.normal([256, 256]) * 0.05) for _ in range(8)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for layer in layers:
                y = tf.nn.relu(y @ layer)
            loss = tf.reduce_mean(tf.square(y - 1))
        gradients = npu.distribute.all_reduce(tape.gradient(loss, layers))
        for layer, gradient in zip(layers, gradients):
            layer.assign_sub(0.01 * gradient)
        return loss

    for number in range(100_000):
        step(tf.random.normal([64, 256]))
"""

TUNE_IT = """\
    import sys
    from npu_device.launch import arguments, tune
    from npu_device._src.tuning.trials import Budget

    sys.exit(tune.run(arguments.parse(sys.argv[1:]), Budget(first=4, plans=1, rounds=1, steps=3)))
"""


@pytest.mark.slow
def test_tuning_a_script(tmp_path: Path) -> None:
    """The real thing, with as few runs as there can be: one to trace, one to measure, the present split and a plan."""
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    (tmp_path / "tune_it.py").write_text(dedent(TUNE_IT))
    splits = tmp_path / "splits"
    ended = subprocess.run(
        [sys.executable, "tune_it.py", "-n", "2", "--tune", "train.py"],
        cwd=tmp_path,
        env=environment(NPU_DEVICE_SPLIT_DIR=str(splits), TF_CPP_MIN_LOG_LEVEL="2", NPU_DEVICE_SPLIT="3,7"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "8 float32 gradients, 2.1 MB; 2 ranks on 1 host" in ended.stdout
    (file,) = splits.iterdir()
    saved = json.loads(file.read_text())
    assert f"set_split_strategy_by_idx({saved['ends']})" in ended.stdout
    assert saved["checked"]
    default = cut_by_default([256 * 256 * 4] * 8)
    assert saved["ends"] == default or saved["found"]["seconds"] < saved["found"]["seconds_before"]
    work = tmp_path / "npu_tune"
    assert (work / "CPU_gradient_fusion.json").is_file()
    cost = CostModel.read(work / MEASURED_FILE)
    assert 0 < cost.beta < 1e-7
    assert 0 < cost.load <= 1, "a collective in shared memory is a core's work"
    assert 0 < cost.pace <= 1
    assert measured_in(work) == CostModel.read(work / MEASURED_FILE)
    # What it has left is enough for npu-tune.
    npu_tune.main([str(work)])
    npu_tune.main(["--simulate", str(work)])


def test_a_run_that_makes_no_steps_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sleep.py").write_text("import time; time.sleep(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_tune, "_SILENT_SECONDS", 0.5)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code = launch_tune.run(arguments.parse(["-n", "2", "--tune", "sleep.py"]))
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = capfd.readouterr().err
    assert code == 1
    assert "first: nothing for 1 s, 0 of 12 steps traced so far. Either a step takes that long" in said
    assert f"Its output is in {tmp_path}/npu_tune/first.log; Ctrl-C ends the tuning." in said
    assert said.count("nothing for") < 5, "each time after twice as long"
    assert "first ended with exit code 0 after 0, 0 traced iterations" in said


def test_the_ranks_end_with_a_tuning_that_is_killed(tmp_path: Path) -> None:
    waits = """
        import os, time
        from pathlib import Path
        Path("pid" + os.environ["RANK_ID"]).write_text(str(os.getpid()))
        time.sleep(60)
        """
    (tmp_path / "train.py").write_text(dedent(waits))
    tuning = subprocess.Popen(
        [*NPURUN, "-n", "2", "--grace", "1", "--tune", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids = wait_for_files(tmp_path, "pid*", 2)
    tuning.kill()
    tuning.wait()
    wait_until(lambda: not any(map(is_running, pids)))
