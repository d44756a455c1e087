"""``python -m benchmarks``: a tiny run works, its tables have their rows, and a rival that fails is reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import ROOT, environment

from benchmarks import docs_page, start
from benchmarks.cases import (
    ALONE,
    EAGER,
    FUNCTION,
    GLOO,
    MIRRORED,
    MPICH,
    ONE_PROCESS,
    RING,
    TCP_BETWEEN,
    TWO_RANKS,
    Case,
    Rival,
    Round,
    hosts_all_reduce,
)
from benchmarks.measuring import run_case
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import CaseResult, Results, RoundResult, Timing, begin, read
from benchmarks.sides import SIDES, Side
from benchmarks.table import FIGURES, tables
from npu_device._src.testing import hosts


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a module of the benchmarks."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    done = run("benchmarks", "--quick", "--cases", "all_reduce", "--ranks", "2", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout, done.stderr
    [head] = [_cells(line) for line in done.stdout.splitlines() if line.startswith("| 2 ranks, ms")]
    assert head == ["2 ranks, ms", "4 B", "1 MiB", "CPU s/GB"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["versions"]["tensorflow"]
    assert results["machine"]["cores"] > 0
    (case,) = results["cases"]
    timings = case["rounds"][1]["timings"]
    assert [timing["rival"] for timing in timings] == [FUNCTION, EAGER, RING, MIRRORED, GLOO, MPICH]
    for timing in timings:
        missing = (timing["error"] or "").startswith("not installed")
        assert missing == (not timing["seconds"])
        assert not missing or timing["rival"] in (GLOO, MPICH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, ip and tc")
def test_a_tiny_run_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is as slow as the round says, so that the ranks don't share memory instead."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    rivals = tuple(each for each in hosts_all_reduce(True, 2).rounds[1].rivals if each.label in (TCP_BETWEEN, GLOO))
    case = Case("hosts_all_reduce", "all_reduce", (Round("1 MiB", 1 << 20, 1, rivals, gbit=0.1),))
    with hosts.hosts(2, 0):
        [measured] = run_case(case, 2, 1, tmp_path).rounds
    for timing in measured.timings:
        missing = (timing.error or "").startswith("not installed") and timing.rival == GLOO
        assert missing or timing.seconds[0] > 0.06, timing  # 8 Mbit at 100 Mbit/s, less what the link lets through


def test_what_a_start_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_SCRIPT", "import time; print('first step', time.time(), 42, flush=True)")
    seconds, megabytes = (each.timings for each in start.measure(2, 1, tmp_path).rounds)
    assert [timing.rival for timing in seconds] == ["TensorFlow alone", "npurun"]
    assert all(0 < timing.seconds[0] < 100 for timing in seconds), seconds
    assert [timing.seconds for timing in megabytes] == [[42.0], [42.0]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def _results(case: str, label: str, *timings: Timing) -> Results:
    results = begin()
    results.cases.append(CaseResult(case, "a case", 2, [RoundResult(label, 8, 5, list(timings))]))
    return results


def test_the_table_has_ratios_and_errors() -> None:
    timings = [
        Timing(ALONE, [0.1, 0.3, 0.1]),
        Timing("npu_device, 4 segments", [0.2, 0.2, 0.4]),
        Timing("npu_device, 8 segments", [0.2], "rank 1: its process ended"),
        Timing(MIRRORED, [0.5, 0.4, 0.3]),
    ]
    text = tables(_results("resnet50", "step", *timings))
    assert "| npu_device, 4 segments | 200 (200–400), ×2.00 |" in text, text
    assert "| npu_device, 8 segments | failed |" in text, text
    assert "* a case, step, npu_device, 8 segments: rank 1: its process ended" in text


def test_what_differs_little_is_compared_in_pairs() -> None:
    """A machine that gets slower from turn to turn doesn't hide that one of the two takes 1 % longer."""
    plain = [0.1, 0.2, 0.3, 0.4]
    timings = [Timing("untraced", plain), Timing("traced", [seconds * 1.01 for seconds in plain])]
    text = tables(_results("checks", "mlp, traced", *timings))
    assert "| MLP, traced, ms | 250 (100–400) | 252 (101–404) | +1.0% ± 0.0% |" in text, text


def test_samples_a_second() -> None:
    timings = [Timing(ONE_PROCESS, [0.04]), Timing(TWO_RANKS, [0.02])]
    results = _results("faster", "mlp", *timings)
    assert f"| {TWO_RANKS} | 400 |" in tables(results)
    assert "two ranks process 2.00 (MLP) times the samples per second" in FIGURES["summary"](results)


def test_a_rival_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDES, "missing", Side("no_side", "NoSide", lambda *_: [], needs=("no-such-package",)))
    rival = Rival("the rival", "missing", "all_reduce", (4,))
    case = Case("resnet50", "a step", (Round("step", 4, 1, (rival,)),))
    results = begin()
    results.cases.append(run_case(case, 2, 1, tmp_path))
    text = tables(results)
    assert "| the rival | not installed |" in text, text
    assert "the rival: not installed: no-such-package; pip install" in text


@pytest.mark.slow
def test_an_error_is_reported_and_the_processes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    processes = ProcessSet("shared_memory", 2, tmp_path)
    try:
        with pytest.raises(RivalError, match=r"rank 1: .*nothing_like_that"):
            processes.ask("prepare", "key", "nothing_like_that", ())
        processes.ask("prepare", "key", "all_reduce", (4, False))
        assert all(min(both) > 0 for both in processes.ask("measure", "key", 1))

        started = time.monotonic()
        processes._processes[1].kill()
        with pytest.raises(RivalError, match="rank 1: its process ended"):
            processes.ask("measure", "key", 1)
        with pytest.raises(RivalError, match="were ended before"):
            processes.ask("measure", "key", 1)
        assert time.monotonic() - started < 40
        assert all(process.poll() is not None for process in processes._processes)
    finally:
        processes.close()


def test_the_pages_have_the_figures_of_the_results() -> None:
    results = read(docs_page.RESULTS)
    places = []
    for page in docs_page.pages():
        text = page.read_text()
        places += [place[2] for place in docs_page.PLACE.finditer(text)]
        assert docs_page.filled(text, results) == text, f"python -m benchmarks --write-docs would change {page.name}"
        guide = page.stem not in ("benchmarks", "notes", "architecture", "environment", "options")
        loose = re.sub(r"```.*?```", "", docs_page.PLACE.sub("", text), flags=re.DOTALL)
        assert not guide or not re.findall(r".*\d (?:GB/s|times as (?:fast|long))\b.*", loose), page.name
    assert sorted(places) == sorted([*FIGURES, "chart"])


def test_results_of_another_version_are_not_shown(tmp_path: Path) -> None:
    results = _results("resnet50", "step", Timing(ALONE, [0.1]))
    results.write(tmp_path / "results.json")
    assert read(tmp_path / "results.json") == results
    page = "before\n<!-- figures: steps -->\nold\n<!-- end of figures -->\nafter\n"
    assert "| no communication | 100 |" in docs_page.filled(page, results)
    results.version = "0.1.0"
    results.write(tmp_path / "results.json")
    empty = page.replace("old\n", "")
    assert read(tmp_path / "results.json") is None
    assert docs_page.filled(docs_page.filled(page, begin()), None) == docs_page.filled(page, begin()) == empty


def test_only_cases_of_the_same_commit_are_added() -> None:
    one, other = _results("resnet50", "step", Timing(ALONE, [0.1])), _results("bert", "step", Timing(ALONE, [0.2]))
    assert [case.case for case in other.with_others_of(one).cases] == ["resnet50", "bert"]
    one.commit = "another"
    assert other.with_others_of(one) is other


@pytest.mark.slow
def test_without_a_gpu_the_benchmark_of_gpus_says_so(tmp_path: Path) -> None:
    done = run("benchmarks", "--gpu", "--output", tmp_path)
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr and "--on-cpu" in done.stderr
