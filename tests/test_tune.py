"""Tuning: what a trace says, and what is tried and kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from npu_device._src.gradients.saved_splits import fingerprint, load_all
from npu_device._src.trace.records import FILE, GradientRecord, Iteration, RankTrace
from npu_device._src.tuning import __main__ as npu_tune
from npu_device._src.tuning.cost_model import MEASURED_FILE, CostModel
from npu_device._src.tuning.keeping import keep
from npu_device._src.tuning.planner import best_plan, predict
from npu_device._src.tuning.traced_run import TracedRun, summarise
from npu_device._src.tuning.trials import Budget, Tried, tune

GRADIENTS = 20
BYTES = 1_000_000
COST = CostModel(2e-3, 1e-9, busy=2e-3)


def trace(rank: int, slower: float = 1.0, steps: int = 8) -> RankTrace:
    """A rank of two: forward 100 ms, then a gradient each 5 ms, two segments, update 10 ms, input 20 ms."""
    backward = [100_000 + 5_000 * number * slower for number in range(1, GRADIENTS + 1)]
    iterations: list[Iteration] = []
    for number in range(1, steps + 1):
        begin = 1e15 + 400_000 * number
        ready = tuple(begin + moment for moment in backward)
        over = ready[-1] + 30_000
        reductions = ((ready[17], ready[17] + 20_000), (ready[-1], over))
        previous = iterations[-1].iteration_end if iterations else None
        iterations.append(Iteration(number, begin, ready[-1], over + 10_000, reductions, ready, previous))
    gradients = tuple(GradientRecord(f"gradient{number}", "float32", BYTES) for number in range(GRADIENTS))
    return RankTrace(
        rank, 2, "here", 1, 0.0, 0.0, "model", "tensorflow", "hccl_world_group", gradients, ((0, 17), (18, 19)),
        tuple(iterations),
    )  # fmt: skip


def write_trace(directory: Path) -> None:
    for rank in range(2):
        one = trace(rank)
        lines = [one.header(), *(iteration.__dict__ for iteration in one.iterations)]
        (directory / f"rank{rank}").mkdir(parents=True)
        (directory / f"rank{rank}" / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_a_trace_says() -> None:
    found = summarise([trace(0), trace(1)], skip=2)
    assert found.step.backward.sizes == (BYTES,) * GRADIENTS
    assert found.step.backward.ready == pytest.approx([0.1 + 0.005 * number for number in range(1, GRADIENTS + 1)])
    assert found.step.backward.end == pytest.approx(0.2)
    assert found.ends == (17, 19)
    assert found.exposed == pytest.approx(0.03)
    assert found.seconds == pytest.approx((0.4,) * 6)
    # 400 ms less 200 ms of forward and backward and 30 ms of hanging over.
    assert found.step.rest == pytest.approx(0.17)
    assert (found.dtype, found.hosts) == ("float32", ("here", "here"))


def test_backward_ends_with_a_gradient_whichever_it_is() -> None:
    """Now the last gradient ends it, now the one before: the median of each alone is 5 ms too soon."""

    def with_turns(one: RankTrace) -> RankTrace:
        turned = [
            replace(step, ready=(*step.ready[:-2], step.ready[-1], step.ready[-2])) if number % 2 else step
            for number, step in enumerate(one.iterations)
        ]
        return replace(one, iterations=tuple(turned))

    backward = summarise([with_turns(trace(0)), with_turns(trace(1))]).step.backward
    assert max(backward.ready) == pytest.approx(backward.end)


def test_the_slowest_rank_counts() -> None:
    quick, slow = trace(0), trace(1, slower=1.5)
    # The collectives end on both at once: 80 ms after the quick one's backward, 30 ms after the slow one's.
    waiting = tuple(replace(one, allreduce=other.allreduce) for one, other in zip(quick.iterations, slow.iterations))
    found = summarise([replace(quick, iterations=waiting), slow])
    assert found.step.backward.end == pytest.approx(0.25)
    assert found.exposed == pytest.approx(0.03), "waiting for the other rank is not communication"


def test_the_slowest_rank_may_be_another_one_in_each_iteration() -> None:
    ranks = [trace(0), trace(0, slower=1.5)]
    alternating = [
        replace(ranks[0], rank=rank, iterations=tuple(
            ranks[(rank + number) % 2].iterations[number] for number in range(8)
        ))
        for rank in range(2)
    ]  # fmt: skip
    assert summarise(alternating).step.backward.end == pytest.approx(0.25)


def test_ranks_may_have_recorded_other_iterations() -> None:
    """A bounded trace drops its older half, on each rank when its own file is full."""
    ranks = [trace(0), trace(0, slower=1.5)]
    slow_at_odd = tuple(ranks[number % 2].iterations[number] for number in range(8))
    whole, late = replace(ranks[0], iterations=slow_at_odd), replace(ranks[0], rank=1, iterations=slow_at_odd[3:])
    # Two of 200 ms and two of 250 ms; matched by their places all would seem to take 250 ms.
    assert summarise([whole, late], skip=1).step.backward.end == pytest.approx(0.225)


def test_the_dtype_with_the_most_bytes_is_tuned() -> None:
    mixed = []
    for rank in range(2):
        one = trace(rank)
        gradients = tuple(replace(gradient, dtype="float16") for gradient in one.gradients[:18]) + one.gradients[18:]
        mixed.append(replace(one, gradients=gradients, segments=((0, 10), (11, 17), (18, 19))))
    found = summarise(mixed)
    assert (found.dtype, len(found.step.backward.sizes), found.ends) == ("float16", 18, (10, 17))


@pytest.mark.parametrize(
    ("traces", "problem"),
    [
        ([], "no trace"),
        ([trace(1)], r"rank\(s\) 0 of 2"),
        ([trace(0), trace(1, steps=2)], "rank 1: 2"),
        ([trace(0), replace(trace(1), model="other")], "rank 1: other"),
    ],
)
def test_traces_of_no_use(traces: list[RankTrace], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        summarise(traces, skip=2)


class World:
    """A script whose steps take what the cost model says, times what ``slowdown`` has for the split."""

    def __init__(self, own: Sequence[int] | None = None) -> None:
        self.first = summarise([trace(0), trace(1)])
        self.ends: list[tuple[int, ...] | None] = []
        self.counted = 0
        self.slowdown: dict[tuple[int, ...], float] = {}
        self._own = tuple(own) if own else None

    def run(self, name: str, ends: Sequence[int] | None, steps: int) -> TracedRun:
        self.ends.append(None if ends is None else tuple(ends))
        self.counted += steps
        actual = self._own or tuple(ends or self.first.ends)
        plan = predict(self.first.step.backward, COST, actual)
        seconds = (self.first.step.alone + plan.exposed) * self.slowdown.get(actual, 1.0)
        return replace(self.first, ends=actual, seconds=(seconds,) * steps, exposed=plan.exposed)


def test_the_best_split_wins_within_fifty_steps() -> None:
    world = World()
    result = tune(world.run, lambda _: COST, lambda _: None, Budget())
    assert result.gained
    assert result.chosen.plan == best_plan(world.first.step.backward, COST)
    assert world.counted <= 50
    assert len(result.tried) == 4
    assert all(len(one.runs) == 2 for one in result.tried)


def test_the_runs_go_there_and_back() -> None:
    world = World()
    tune(world.run, lambda _: COST, lambda _: None, Budget())
    assert world.ends[0] is world.ends[1] is None
    assert world.ends[1:5] == world.ends[5:][::-1]


def test_a_prediction_that_turns_out_slower_is_not_kept() -> None:
    world = World()
    best = best_plan(world.first.step.backward, COST).ends
    world.slowdown = {best: 1.2}
    result = tune(world.run, lambda _: COST, lambda _: None, Budget())
    assert result.chosen.plan.ends != best
    world.slowdown = dict.fromkeys((one.plan.ends for one in result.tried[1:]), 1.2)
    result = tune(world.run, lambda _: COST, lambda _: None, Budget())
    assert not result.gained
    assert result.chosen.plan.ends == world.first.ends


def one_of(runs: list[list[float]]) -> Tried:
    first = summarise([trace(0), trace(1)])
    plan = best_plan(first.step.backward, COST)
    return Tried("", plan, [replace(first, seconds=tuple(seconds)) for seconds in runs])


def test_disturbed_steps_do_not_decide() -> None:
    present = one_of([[1.00, 1.00, 1.01, 1.02, 1.03], [1.01, 1.01, 1.02, 1.03, 1.04]])
    better = one_of([[0.97, 0.98, 1.30, 1.40, 1.50], [1.60, 0.98, 0.99, 1.05, 1.20]])
    assert better.faster_than(present)
    assert better.seconds < present.seconds


def test_a_split_that_was_slower_once_does_not_win() -> None:
    present = one_of([[1.0] * 5, [1.2] * 5])
    assert not one_of([[0.9] * 5, [1.25] * 5]).faster_than(present)
    assert one_of([[0.9] * 5, [1.05] * 5]).faster_than(present), "the machine got slower in the second round"


def test_a_script_with_a_split_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="remove the call of set_split_strategy_by_idx"):
        tune(World(own=[17, 19]).run, lambda _: COST, lambda _: None, Budget())


def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_DEVICE_SPLIT_DIR", str(tmp_path / "splits"))
    world = World()
    result = tune(world.run, lambda _: COST, lambda _: None, Budget())
    _, fusion = keep(result, tmp_path)
    (split,) = load_all()
    assert split.ends == result.chosen.plan.ends
    assert split.checked
    assert split.model == fingerprint("float32", [BYTES] * GRADIENTS)
    assert split.place.world_size == 2
    (graph,) = json.loads(fusion.read_text())
    assert fusion.name == "CPU_gradient_fusion.json"
    assert graph["modelhash"] == split.model
    assert graph["modelvalue"]["gradientSize"] == [BYTES] * GRADIENTS
    assert graph["modelvalue"]["gradientTime"] == [105_000, *[5_000] * (GRADIENTS - 1)]


def test_a_file_that_is_no_split_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_DEVICE_SPLIT_DIR", str(tmp_path))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "newer.json").write_text('{"version": 2}')
    assert load_all() == []
    assert "broken.json" in caplog.text
    assert "version 2; expected 1" in caplog.text


def test_npu_tune_prints_the_line_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    COST.write(tmp_path / MEASURED_FILE)
    npu_tune.main([str(tmp_path)])
    text = capsys.readouterr().out
    best = best_plan(summarise([trace(0), trace(1)]).step.backward, COST)
    assert f"set_split_strategy_by_idx({list(best.ends)})" in text
    assert "20 float32 gradients, 20.0 MB; 2 ranks on 1 host" in text
    for name in ("as it is now", "default", "one segment", "one per gradient", "best", "(traced"):
        assert any(line.startswith(name) for line in text.splitlines())


def test_npu_tune_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    npu_tune.main(["--simulate", str(tmp_path), "--network", "25gbe"])
    text = capsys.readouterr().out
    assert "  1024 tree" in text
    assert "Assumptions: " in text


def test_npu_tune_without_a_measurement(tmp_path: Path) -> None:
    write_trace(tmp_path)
    with pytest.raises(SystemExit, match=r"no collectives\.json.*\n.*--alpha"):
        npu_tune.main([str(tmp_path)])
