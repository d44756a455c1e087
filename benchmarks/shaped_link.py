"""Two hosts on one machine, with a network between them as slow as one likes: what tuning is worth there.

``sudo .venv/bin/python -m benchmarks.shaped_link`` needs root, ``ip`` and ``tc``. Each rank lives in a network
namespace; a veth pair joins them, and a token bucket holds it to 1 or 10 Gbit/s. Tunes first, then runs all rivals in
turn: the default split, the tuned one, one segment, MultiWorkerMirroredStrategy, and a sweep over the best splits of
each number of segments and over segments of equal bytes.
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
from pathlib import Path
from typing import Any

from benchmarks.two_hosts import ADDRESSES, on_host, shape, two_hosts
from npu_device.profiling.records import read
from npu_device.tuning.cost_model import CostModel
from npu_device.tuning.planner import best_plans, predict
from npu_device.tuning.traced import Traced, traced
from npu_device.tuning.trials import COST_FILE, FIRST, WARM_UP

_ROOT = Path(__file__).parents[1]
_PORTS = {"npu": 29688, "mirrored": 29700}
_CLUSTER = ("RANK_", "CM_", "HCCL_", "NPU_", "TF_CONFIG", "ASCEND_", "DEVICE_ID", "JOB_ID", "PROFILING_", "AOE_")
_ENDLESS = 100_000  # steps of a run that the tuner stops
_TIMEOUT = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shaped_link", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=("resnet50", "bert"), default=["resnet50", "bert"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 10.0], help="Gbit/s (default: 1 10)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each rival runs (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps that count in each run (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("build/shaped_link"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root. What to do: start it with sudo.")
    results = []
    with two_hosts():
        for rate in options.rates:
            shape(rate)
            for model in options.models:
                directory = (options.output / f"{model}_{rate:g}gbit").resolve()
                results.append(_compare(model, rate, options.rounds, options.steps, directory))
                (options.output / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
                print(_table(results[-1]), flush=True)


def _compare(model: str, rate: float, rounds: int, steps: int, directory: Path) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    splits = directory / "splits"
    for old in splits.glob("*.json"):
        old.unlink()
    _progress(f"{model}, {rate:g} Gbit/s: tuning")
    _both_npu(model, _ENDLESS, directory, ["--tune"], {"NPU_DEVICE_SPLIT_DIR": str(splits)})
    (saved,) = splits.glob("*.json")
    tuned = json.loads(saved.read_text(encoding="utf-8"))["ends"]
    work = directory / "npu_tune"
    found = traced(read(work / FIRST), WARM_UP)
    cost = CostModel.from_dict(json.loads((work / COST_FILE).read_text(encoding="utf-8")))
    rivals = _rivals(found, cost, tuned)
    seconds: dict[str, list[float]] = {name: [] for name in (*rivals, "MultiWorkerMirroredStrategy")}
    for turn in range(rounds):
        for name in seconds if turn % 2 == 0 else reversed(seconds):
            _progress(f"{model}, {rate:g} Gbit/s, round {turn + 1} of {rounds}: {name}")
            if name in rivals:
                split = ",".join(map(str, rivals[name]))
                out = _both_npu(model, steps, directory, [], {"NPU_DEVICE_SPLIT": split})
            else:
                out = _both_mirrored(model, steps, directory)
            seconds[name].append(_seconds(out))
    rows = []
    for name, times in seconds.items():
        ends = rivals.get(name)
        exposed = predict(found.step.backward, cost, ends).exposed if ends else None
        predicted = None if exposed is None else found.step.alone + exposed
        rows.append({"name": name, "ends": ends, "seconds": times, "predicted": predicted})
    return {"model": model, "gbit": rate, "cost": cost.as_dict(), "traced_exposed": found.exposed, "rows": rows}


def _rivals(found: Traced, cost: CostModel, tuned: list[int]) -> dict[str, list[int]]:
    backward = found.step.backward
    last = len(backward.sizes) - 1
    rivals = {"default": list(found.ends), "tuned": tuned, "one segment": [last]}
    for plan in best_plans(backward, cost)[1:]:
        rivals[f"sweep: best {len(plan.ends)}"] = list(plan.ends)
    total = sum(backward.sizes)
    for count in (2, 4, 8):
        ends: list[int] = []
        given = 0
        for number, size in enumerate(backward.sizes):
            given += size
            if given >= total * (len(ends) + 1) / count and number < last:
                ends.append(number)
        rivals[f"sweep: {count} of equal bytes"] = [*ends, last]
    return rivals


def _both_npu(model: str, steps: int, directory: Path, extra: Sequence[str], variables: dict[str, str]) -> str:
    commands = []
    for node, address in enumerate(ADDRESSES):
        launcher = [sys.executable, "-m", "npu_device.launch", *extra, "-n", "1", "--nnodes", "2"]
        launcher += ["--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", str(_PORTS["npu"])]
        launcher += ["-m", "benchmarks.shaped_step", model, "npu", str(steps), str(node)]
        commands.append((launcher, {**variables, "HCCL_IF_IP": address}))
    return _both(commands, directory)


def _both_mirrored(model: str, steps: int, directory: Path) -> str:
    workers = [f"{address}:{_PORTS['mirrored']}" for address in ADDRESSES]
    commands = []
    for node in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": node}}
        command = [sys.executable, "-m", "benchmarks.shaped_step", model, "mirrored", str(steps), str(node)]
        commands.append((command, {"TF_CONFIG": json.dumps(config)}))
    return _both(commands, directory)


def _both(commands: Sequence[tuple[list[str], dict[str, str]]], directory: Path) -> str:
    """Run a command on each host; the output of the first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_CLUSTER)}
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(commands))
    processes, logs = [], []
    try:
        for node, (command, variables) in enumerate(commands):
            # Each host has cores of its own.
            mine = ",".join(map(str, cores[node * share : (node + 1) * share] or cores))
            environment = {**inherited, **variables, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
            logs.append(directory / f"host{node}.log")
            with logs[-1].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        on_host(node, ["taskset", "-c", mine, *command]),
                        cwd=directory,
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


def _seconds(output: str) -> float:
    line = next(line for line in reversed(output.splitlines()) if '{"seconds"' in line)
    return float(json.loads(line[line.index("{") :])["seconds"])


def _table(result: dict[str, Any]) -> str:
    lines = [f"\n### {result['model']}, {result['gbit']:g} Gbit/s\n"]
    lines += ["| split | segments | ms a step | predicted, ms |", "|---|--:|--:|--:|"]
    for row in result["rows"]:
        predicted = "" if row["predicted"] is None else f"{row['predicted'] * 1e3:.0f}"
        segments = "" if row["ends"] is None else str(len(row["ends"]))
        lines.append(f"| {row['name']} | {segments} | {statistics.median(row['seconds']) * 1e3:.0f} | {predicted} |")
    return "\n".join(lines)


def _progress(text: str) -> None:
    print(f"[shaped_link] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
