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

from benchmarks import between_hosts, docs_page
from benchmarks.cases import (
    ALONE,
    DEFAULT_SPLIT,
    EAGER,
    FUNCTION,
    GLOO,
    MIRRORED,
    MPICH,
    PAIRS,
    RING,
    STEPS,
    TRACED,
    Case,
    Rival,
    Round,
)
from benchmarks.measuring import run_case
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import CaseResult, RoundResult, Timing, begin
from benchmarks.sides import SIDES, Side
from benchmarks.table import tables
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
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row for row in rows if row[0].isdigit()] == ["4 B", "1 MiB", "1 MiB", "4 B", "1 MiB"]
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


@pytest.mark.slow
@pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, ip and tc")
def test_a_tiny_run_between_hosts(tmp_path: Path) -> None:
    options = ("--quick", "--cases", "all_reduce", "--rates", "10", "--repeats", "1", "--output", tmp_path)
    done = run("benchmarks.between_hosts", *options)
    assert done.returncode == 0, done.stderr
    rows = {cells[0]: cells[1:] for cells in map(_cells, done.stdout.splitlines()) if cells}
    assert rows["10 Gbit/s"] == ["4 B", "1 MiB"], done.stdout
    for rival in (between_hosts.RING, between_hosts.MPI, GLOO, MPICH):
        small, large = rows[rival]
        missing = small == large == "not installed" and rival != between_hosts.RING
        assert missing or re.fullmatch(r"[\d.]+ \([\d.]+\)", large), done.stderr


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def test_the_table_has_ratios_and_errors() -> None:
    timings = [
        Timing(ALONE, [0.1, 0.3, 0.1]),
        Timing("npu_device, 4 segments", [0.2, 0.2, 0.4]),
        Timing("npu_device, 8 segments", [0.2], "rank 1: its process ended"),
        Timing(MIRRORED, [0.5, 0.4, 0.3]),
    ]
    results = begin(3)
    results.cases.append(CaseResult("resnet50", "a step", STEPS, 2, [RoundResult("step", 100, 5, timings)]))
    text = tables(results)
    assert re.search(r"^\| npu_device, 4 segments +\| +200 \| +200 … 400 \| +2.00 \| +2.00 \|$", text, re.M), text
    assert re.search(r"^\| npu_device, 8 segments +\| +failed \|", text, re.M), text
    assert "* step, npu_device, 8 segments: rank 1: its process ended" in text


def test_what_differs_little_is_compared_in_pairs() -> None:
    """A machine that gets slower from turn to turn doesn't hide that one of the two takes 1 % longer."""
    untraced = [0.1, 0.2, 0.3, 0.4]
    timings = [Timing(DEFAULT_SPLIT, untraced), Timing(TRACED, [seconds * 1.01 for seconds in untraced])]
    results = begin(1)
    results.cases.append(CaseResult("trace", "a step", PAIRS, 2, [RoundResult(RING, 100, 3, timings)]))
    text = tables(results)
    assert re.search(rf"^\| {RING} \| +250 \| +252 \| \+1.00% ± 0.00% \| \+2.50 ± 0.81 \|$", text, re.M), text


def test_a_rival_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDES, "missing", Side("no_side", "NoSide", lambda *_: [], needs=("no-such-package",)))
    rival = Rival("the rival", "missing", "all_reduce", (4,))
    case = Case("resnet50", "a step", STEPS, 2, (Round("step", 4, 1, (rival,)),))
    results = begin(1)
    results.cases.append(run_case(case, 2, 1, tmp_path))
    text = tables(results)
    assert re.search(r"^\| the rival \| +not installed \|", text, re.M), text
    assert "* the rival: not installed: no-such-package; pip install" in text


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


def test_the_page_has_a_place_for_the_results() -> None:
    page = docs_page.PAGE.read_text()
    once = docs_page.replace_results(page, "one")
    assert "one" in once
    assert docs_page.replace_results(once, "two") == docs_page.replace_results(page, "two")
    with pytest.raises(ValueError, match="end of results"):
        docs_page.replace_results("another page", "one")


@pytest.mark.slow
def test_without_a_gpu_the_benchmark_of_gpus_says_so(tmp_path: Path) -> None:
    done = run("benchmarks", "--gpu", "--output", tmp_path)
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr and "--on-cpu" in done.stderr
