"""Tuning on slow networks: several hosts on one machine, with links of any chosen speed between them.

``sudo .venv/bin/python -m benchmarks.shaped_link`` needs root, ``ip`` and ``tc``. Each rank runs in a network namespace
with a core of its own; a token bucket limits its link to 1 or 10 Gbit/s. In each round it tunes and then runs all
rivals: the default split, the tuned one, one segment, MultiWorkerMirroredStrategy, and a sweep over the best splits
into some numbers of segments and over segments of equal bytes, chosen by the first tuning. Medians of both predictions
and runs are used, so that noise of the machine affects both alike. Last, the tuned split runs against the best of all,
turn by turn: the best of several is partly so by luck.

With ``--simulation`` it checks ``npu-tune --simulate`` instead: the forecast from the trace and the measurement of two
hosts for two and four hosts, against runs on two and four. There each rank has half a core, whatever their number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from npu_device._src.trace.records import read
from npu_device._src.tuning.cost_model import CALIBRATED_FILE, MEASURED_FILE, CostModel
from npu_device._src.tuning.networks import link_of, ring
from npu_device._src.tuning.planner import best_plan, equal_plan, predict
from npu_device._src.tuning.simulate import simulate
from npu_device._src.tuning.traced_run import TracedRun, summarise
from npu_device._src.tuning.trials import FIRST, WARM_UP
from npu_device.testing.hosts import address, hosts, on_host

_ROOT = Path(__file__).parents[1]
_PORTS = {"npu": 29688, "mirrored": 29700}
_CLUSTER = ("RANK_", "CM_", "HCCL_", "NPU_", "TF_CONFIG", "ASCEND_", "DEVICE_ID", "JOB_ID", "PROFILING_", "AOE_")
_ENDLESS = 100_000  # steps of a run that the tuner stops
_TIMEOUT = 1800.0
_MIRRORED = "MultiWorkerMirroredStrategy"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shaped_link", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=("resnet50", "bert"), default=["resnet50", "bert"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 10.0], help="Gbit/s (default: 1 10)")
    parser.add_argument("--rounds", type=int, default=2, help="how often each rival runs (default: 2)")
    parser.add_argument("--steps", type=int, default=8, help="steps that count in each run (default: 8)")
    parser.add_argument("--simulation", action="store_true", help="check npu-tune --simulate on two and four hosts")
    parser.add_argument("--output", type=Path, default=Path("build/shaped_link"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root. What to do: start it with sudo.")
    results = []
    for rate in options.rates:
        for model in options.models:
            directory = (options.output / f"{model}_{rate:g}gbit").resolve()
            check = _check_simulation if options.simulation else _compare
            results.append(check(model, rate, options.rounds, options.steps, directory))
            name = "simulation.json" if options.simulation else "results.json"
            (options.output / name).write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(_table(results[-1]), flush=True)


Rivals = dict[str, Optional[list[int]]]
"""The split of each rival; none is MultiWorkerMirroredStrategy."""


@dataclass
class Measured:
    """A rival's measured seconds per step, and seconds of communication after backward."""

    seconds: list[float]
    exposed: list[float]


def _nothing(rivals: Rivals) -> dict[str, Measured]:
    return {name: Measured([], []) for name in rivals}


@dataclass(frozen=True)
class Tuning:
    """The tuner's results: its first trace, the collectives as measured and as its runs show them, and its split."""

    first: TracedRun
    cost: CostModel
    calibrated: CostModel
    ends: list[int]


@dataclass(frozen=True)
class Job:
    """A training on some hosts."""

    model: str
    gbit: float
    cores: tuple[int, ...]  # of each host
    directory: Path

    def say(self, text: str) -> None:
        """Report progress to the user."""
        where = f"{self.model}, {len(self.cores)} hosts, {self.gbit:g} Gbit/s"
        print(f"[shaped_link] {where}: {text}", file=sys.stderr, flush=True)

    def tune(self) -> Tuning:
        """Run the tuner."""
        self.say("tuning")
        splits = self.directory / "splits"
        for old in splits.glob("*.json"):
            old.unlink()
        self._npu(_ENDLESS, ["--tune"], {"NPU_DEVICE_SPLIT_DIR": str(splits)})
        (saved,) = splits.glob("*.json")
        work = self.directory / "npu_tune"
        measured, calibrated = (CostModel.read(work / name) for name in (MEASURED_FILE, CALIBRATED_FILE))
        ends = json.loads(saved.read_text(encoding="utf-8"))["ends"]
        return Tuning(summarise(read(work / FIRST), WARM_UP), measured, calibrated, ends)

    def run(self, name: str, ends: Sequence[int] | None, steps: int, measured: Measured) -> None:
        """Train for some steps with a split, or with MultiWorkerMirroredStrategy where there is none."""
        if ends is None:
            output = self._mirrored(steps)
        else:
            trace = self.directory / "traces" / name.replace(" ", "_")
            for old in trace.glob("rank*/*"):
                old.unlink()
            output = self._npu(steps, ["--trace", str(trace)], {"NPU_DEVICE_SPLIT": ",".join(map(str, ends))})
            measured.exposed.append(summarise(read(trace), WARM_UP).exposed)
        line = next(line for line in reversed(output.splitlines()) if '{"seconds"' in line)
        measured.seconds.append(float(json.loads(line[line.index("{") :])["seconds"]))

    def take_turn(self, turn: int, rivals: Rivals, steps: int, measured: dict[str, Measured]) -> None:
        """Run all rivals; in every other turn from the last to the first."""
        for name in rivals if turn % 2 == 0 else reversed(rivals):
            self.say(f"round {turn + 1}: {name}")
            self.run(name, rivals[name], steps, measured[name])

    def take_turns(self, rivals: Rivals, rounds: int, steps: int) -> dict[str, Measured]:
        """Run all rivals, there and back again."""
        measured = _nothing(rivals)
        for turn in range(rounds):
            self.take_turn(turn, rivals, steps, measured)
        return measured

    def _npu(self, steps: int, extra: Sequence[str], variables: dict[str, str]) -> str:
        commands = []
        for node in range(len(self.cores)):
            launcher = [sys.executable, "-m", "npu_device.launch", *extra, "-n", "1", "--nnodes", str(len(self.cores))]
            launcher += ["--node-rank", str(node), "--master-addr", address(0), "--master-port", str(_PORTS["npu"])]
            commands.append(([*launcher, *self._step("npu", steps, node)], {**variables, "HCCL_IF_IP": address(node)}))
        return self._all(commands)

    def _mirrored(self, steps: int) -> str:
        workers = [f"{address(node)}:{_PORTS['mirrored']}" for node in range(len(self.cores))]
        commands = []
        for node in range(len(self.cores)):
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": node}}
            command = [sys.executable, *self._step("mirrored", steps, node)]
            commands.append((command, {"TF_CONFIG": json.dumps(config)}))
        return self._all(commands)

    def _step(self, side: str, steps: int, node: int) -> list[str]:
        return ["-m", "benchmarks.shaped_step", self.model, side, str(steps), str(node), str(len(self.cores))]

    def _all(self, commands: Sequence[tuple[list[str], dict[str, str]]]) -> str:
        """Run a command on each host; return the output of the first."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_CLUSTER)}
        processes, logs = [], []
        try:
            for node, (command, variables) in enumerate(commands):
                environment = {**inherited, **variables, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
                logs.append(self.directory / f"host{node}.log")
                with logs[-1].open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            on_host(node, ["taskset", "-c", str(self.cores[node]), *command]),
                            cwd=self.directory,
                            env={**environment, "TF_USE_LEGACY_KERAS": "1"},
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            codes = [process.wait(_TIMEOUT) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait()
        if any(codes):
            tails = "\n".join(f"--- {log} ---\n" + "\n".join(log.read_text().splitlines()[-30:]) for log in logs)
            raise RuntimeError(f"exit codes {codes} of {commands[0][0]}\n{tails}")
        return logs[0].read_text(errors="replace")


def _compare(model: str, gbit: float, rounds: int, steps: int, directory: Path) -> dict[str, Any]:
    """Compare all rivals on two hosts, each with a core of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    job = Job(model, gbit, (first, second), directory)
    with hosts(2, gbit):
        tunings = [job.tune()]
        tuned = tunings[0].ends
        splits = _splits(tunings[0])
        rivals: Rivals = {**splits, _MIRRORED: None}
        measured = _nothing(rivals)
        for turn in range(rounds):
            if turn > 0:
                tunings.append(job.tune())
            job.take_turn(turn, rivals, steps, measured)
        best = min(splits, key=lambda name: statistics.median(measured[name].seconds))
        duel = {} if splits[best] == tuned else job.take_turns({"tuned": tuned, best: splits[best]}, rounds + 1, steps)
    rows = []
    for name, one in measured.items():
        ends = rivals[name]
        by_measurement = [_predicted(tuning.first, tuning.cost, ends) for tuning in tunings] if ends else []
        by_runs = [_predicted(tuning.first, tuning.calibrated, ends) for tuning in tunings] if ends else []
        rows.append(_row(name, ends, one, by_measurement, by_runs))
    return {
        "title": f"{model}, 2 hosts, {gbit:g} Gbit/s",
        "cost": [tuning.cost.as_dict() for tuning in tunings],
        "calibrated": [tuning.calibrated.as_dict() for tuning in tunings],
        "tuned": [tuning.ends for tuning in tunings],
        "rows": rows,
        "best": best,
        "duel": {name: one.seconds for name, one in duel.items()},
    }


def _predicted(first: TracedRun, cost: CostModel, ends: Sequence[int]) -> dict[str, float]:
    """Return the predicted seconds per step and exposed seconds."""
    step = first.without_collectives(cost)
    plan = predict(step.backward, cost, ends)
    return {"seconds": step.alone + plan.added, "exposed": plan.exposed}


def _splits(tuning: Tuning) -> dict[str, list[int]]:
    backward = tuning.first.without_collectives(tuning.calibrated).backward
    one = [len(backward.sizes) - 1]
    candidates = {"default": list(tuning.first.ends), "tuned": tuning.ends, "one segment": one}
    candidates |= {
        f"sweep: best {count}": list(best_plan(backward, tuning.calibrated, count, fewest=count).ends)
        for count in (2, 4)
    }
    candidates["sweep: 4 of equal bytes"] = list(equal_plan(backward, tuning.calibrated).ends)
    splits: dict[str, list[int]] = {}
    for name, ends in candidates.items():
        if name == "tuned" or ends not in splits.values():
            splits[name] = ends
    return splits


def _check_simulation(model: str, gbit: float, rounds: int, steps: int, directory: Path) -> dict[str, Any]:
    """Compare forecasts from two hosts for two and four with runs on them; half a core for each rank."""
    directory.mkdir(parents=True, exist_ok=True)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    for cores in ((first, first), (first, first, second, second)):
        job = Job(model, gbit, cores, directory)
        with hosts(len(cores), gbit):
            if len(cores) == 2:
                tuning = job.tune()
                found, cost = tuning.first, tuning.calibrated
                step = found.without_collectives(cost)
                expected = {row.ranks: row for row in simulate(step, link_of(cost, 2), [2, 4]) if row.shape == "ring"}
            row = expected[len(cores)]
            rivals: Rivals = {"default": list(found.ends), "best": list(row.ends)}
            measured = job.take_turns(rivals, rounds, steps)
        for name, seconds in (("default", row.default), ("best", row.tuned)):
            plan = predict(step.backward, ring(link_of(cost, 2), len(cores)), list(rivals[name] or ()))
            simulated = {"seconds": seconds, "exposed": plan.exposed}
            rows.append(_row(f"{len(cores)} hosts, {name} split", rivals[name], measured[name], [], [simulated]))
    return {"title": f"simulation of {model}, {gbit:g} Gbit/s", "cost": cost.as_dict(), "rows": rows}


def _row(
    name: str,
    ends: Sequence[int] | None,
    measured: Measured,
    by_measurement: list[dict[str, float]],
    by_runs: list[dict[str, float]],
) -> dict[str, Any]:
    return {
        "name": name,
        "segments": len(ends) if ends else None,
        "seconds": measured.seconds,
        "exposed": measured.exposed,
        "predicted": by_measurement,
        "predicted after the tuner's runs": by_runs,
    }


def _table(result: dict[str, Any]) -> str:
    lines = [f"\n### {result['title']}\n"]
    titles = ["split", "segments", "ms per step", "calibrated", "exposed, ms"]
    titles += ["predicted", "off by", "calibrated", "off by"]
    lines += [f"| {' | '.join(titles)} |", "|---" + "|--:" * (len(titles) - 1) + "|"]
    for row in result["rows"]:
        predictions = row["predicted"], row["predicted after the tuner's runs"]
        seconds = _median(predictions[1], "seconds")
        cells = [row["name"], row["segments"] or "–", f"{statistics.median(row['seconds']) * 1e3:.0f}"]
        cells.append(f"{seconds * 1e3:.0f}" if seconds is not None else "–")
        if row["exposed"]:
            exposed = statistics.median(row["exposed"])
            cells.append(f"{exposed * 1e3:.0f}")
            for each in predictions:
                one = _median(each, "exposed")
                off = f"{one / exposed - 1:+.0%}" if one is not None and exposed else "–"
                cells += [f"{one * 1e3:.0f}" if one is not None else "–", off]
        else:
            cells += ["–"] * 5
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if result.get("duel"):
        ratios = [tuned / best - 1 for tuned, best in zip(*result["duel"].values())]
        each = ", ".join(f"{ratio:+.1%}" for ratio in ratios)
        lines.append(f"\ntuned against {result['best']}: {statistics.median(ratios):+.1%} ({each})")
    return "\n".join(lines)


def _median(predictions: list[dict[str, float]], what: str) -> float | None:
    return statistics.median(each[what] for each in predictions) if predictions else None


if __name__ == "__main__":
    main()
