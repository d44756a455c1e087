"""``npurun --tune``: which splits are tried, which one wins, and the real thing with a script."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from launcher import NPURUN, environment, is_running, wait_for_files, wait_until
from pool import Pool
from ranks import free_port

from npu_device._src.gradients.split_strategy import cut_by_size
from npu_device._src.trace.records import FILE, GradientRecord, Iteration, RankTrace
from npu_device._src.tuning import trials
from npu_device._src.tuning.trials import SPLITS, WARM_UP, Run, Split, Tried
from npu_device.launch import arguments
from npu_device.launch import tune as launch_tune

GRADIENTS = 20
HALVES = (50.0, 50.0)


def write_trace(directory: Path, split: Split, ranks: int = 2, step: float = 400e3, exposed: float = 30e3) -> None:
    """Traces of two ranks, of which rank 0 is later by 20 ms and waits less for the reduction."""
    gradients = tuple(GradientRecord(f"gradient{number}", "float32", 1_000_000) for number in range(GRADIENTS))
    ends = cut_by_size([one.bytes for one in gradients], split or (90, 10))
    segments = tuple(zip([0, *(end + 1 for end in ends)], ends))
    for rank in range(ranks):
        iterations = []
        for number in range(WARM_UP + 3):
            end = 1e15 + step * (number + 1)
            ready = end - 10e3 - exposed - 20e3 * rank
            reduced = ((ready, end - 10e3),) * len(segments)
            iterations.append(Iteration(number + 1, end - step, ready, end, reduced, (ready,) * GRADIENTS, end - step))
        head = RankTrace(rank, 2, "here", 1, 0.0, 0.0, "m", "b", "hccl_world_group", gradients, segments)
        (directory / f"rank{rank}").mkdir(parents=True)
        lines = [head.header(), *(iteration.__dict__ for iteration in iterations)]
        (directory / f"rank{rank}" / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_runs_go_there_and_back() -> None:
    runs = [(one.name, one.split) for one in trials.runs(rounds=2)]
    assert [split for _, split in runs] == [*SPLITS, *SPLITS[::-1]]
    assert len({name for name, _ in runs}) == len(runs)
    assert sum(one.steps for one in trials.runs()) <= 64


def test_what_the_traces_say_and_which_split_wins(tmp_path: Path) -> None:
    tried: dict[Split, Tried] = {}
    for one in trials.runs([None, HALVES], rounds=2):
        write_trace(tmp_path / one.name, one.split, step=300e3 if one.split else 400e3)
        trials.add(tried, one, tmp_path / one.name)
    assert tried[None].step == pytest.approx(0.4)
    assert tried[None].exposed == pytest.approx([0.03] * 2), "waiting for the other rank is not communication"
    assert [tried[None].segments, tried[HALVES].segments] == [2, 2]
    assert trials.winner(tried).split == HALVES
    text = trials.outcome(tried)
    assert "33.3% faster" in text
    assert "set_split_strategy_by_size([50.0, 50.0])" in text
    assert "NPU_DEVICE_SPLIT=50%,50%" in text


@pytest.mark.parametrize(
    ("present", "other", "wins"),
    [
        ([[1.00, 1.00, 1.01, 1.02], [1.01, 1.01, 1.02, 1.03]], [[0.97, 0.98, 1.30, 1.40], [0.98, 0.99, 1.60, 2]], True),
        ([[1.0] * 4, [1.2] * 4], [[0.9] * 4, [1.25] * 4], False),
        ([[1.0] * 4, [1.2] * 4], [[0.9] * 4, [1.05] * 4], True),
    ],
    ids=["disturbed steps don't decide", "slower once", "the machine got slower"],
)
def test_who_wins(present: list[list[float]], other: list[list[float]], wins: bool) -> None:
    tried: dict[Split, Tried] = {None: Tried(None, present, [0.1] * 2, 2), HALVES: Tried(HALVES, other, [0.1] * 2, 2)}
    assert (trials.winner(tried).split == HALVES) == wins
    assert ("keep it." in trials.outcome(tried)) == (not wins)


def test_runs_of_no_use(tmp_path: Path) -> None:
    write_trace(tmp_path / "own", (90, 10))
    with pytest.raises(ValueError, match=r"remove the call of set_split_strategy_by_idx"):
        trials.add({}, Run("own", HALVES, 5), tmp_path / "own")
    write_trace(tmp_path / "few", None, ranks=1)
    with pytest.raises(ValueError, match=r"no trace of rank\(s\) 1"):
        trials.add({}, Run("few", None, 5), tmp_path / "few")


def cut_with(choice: str, sizes: list[int]) -> tuple[list[list[int]], list[str]]:
    """The segments of a list of float32 gradients of these lengths, and the warnings about them."""
    import tensorflow as tf

    from npu_device._src.gradients.segments import FirstOrders, cut

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npu_device").addHandler(handler)
    os.environ["NPU_DEVICE_SPLIT"] = choice
    try:
        # Eager tensors that were made in the order of the list count from its end.
        return cut(FirstOrders(), [tf.zeros([size]) for size in sizes], "sum", 1, "hccl_world_group"), warnings
    finally:
        del os.environ["NPU_DEVICE_SPLIT"]
        logging.getLogger("npu_device").removeHandler(handler)


def from_the_environment() -> dict[str, Any]:
    from hccl.split.api import set_split_strategy_by_size
    from npu_device._src.gradients import split_strategy

    found = {"fits": cut_with("[1, 3, 5]", [8] * 6), "other": cut_with("1,3,5", [8] * 5), "short": cut_with("1,3", [8])}
    found |= {"percentages": cut_with("50%, 50%", [8] * 6), "auto": cut_with("auto", [8] * 5)}
    set_split_strategy_by_size([50, 50])
    found["own"] = cut_with("1,3,5", [8] * 6)
    split_strategy._strategies.clear()
    return found


def test_the_split_from_the_environment(single: Pool) -> None:
    (found,) = single.run(from_the_environment)
    assert found["fits"] == ([[5, 4], [3, 2], [1, 0]], [])
    segments, (warning,) = found["other"]
    assert sum(map(len, segments)) == 5
    assert segments[0] == [4, 3, 2, 1, 0][: len(segments[0])]
    assert "its last number has to be 4" in warning
    assert found["short"] == ([[0]], [])
    assert found["percentages"] == ([[5, 4, 3], [2, 1, 0]], [])
    assert found["own"] == found["percentages"]
    assert found["auto"][0] == segments and "saved splits are gone" in found["auto"][1][0]


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
    from npu_device._src.tuning import trials

    few = list(trials.runs([None, (50.0, 50.0)], rounds=1, steps=3))
    trials.runs = lambda: few
    sys.exit(tune.run(arguments.parse(sys.argv[1:])))
"""


@pytest.mark.slow
def test_tuning_a_script(tmp_path: Path) -> None:
    """The real thing, on two nodes and with as few runs as there can be; the directory has the traces of an earlier
    tuning.
    """
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    (tmp_path / "tune_it.py").write_text(dedent(TUNE_IT))
    write_trace(tmp_path / "npu_tune" / "run1", HALVES)
    launch = [sys.executable, "tune_it.py", "-n", "1", "--tune"]
    launch += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    variables = environment(TF_CPP_MIN_LOG_LEVEL="2", NPU_DEVICE_SPLIT="3,7", NPU_DEVICE_SECRET="the same")
    running = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), "train.py"],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    table = outputs[0][0].splitlines()
    assert table[1].startswith("as it is now") and table[2].startswith("50, 50")
    assert sum("<- chosen" in line for line in table) == 1
    assert outputs[1][0] == ""


def test_a_run_that_makes_no_steps_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sleep.py").write_text("import time; time.sleep(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_tune, "TRIAL_SILENT_SECONDS", 0.5)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code = launch_tune.run(arguments.parse(["-n", "2", "--tune", "sleep.py"]))
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = capfd.readouterr().err
    assert code == 1
    assert "run1: nothing for 1 s, 0 of 8 steps traced so far. Either a step takes that long" in said
    assert f"Its output is in {tmp_path}/npu_tune/run1-node0.log; Ctrl-C ends the tuning." in said
    assert said.count("nothing for") < 5, "each time after twice as long"
    assert "run1 ended with exit code 0 after 0 traced iterations" in said


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
