"""``python -m benchmarks``: a tiny run works, its tables have their rows, and a rival that fails is reported."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launcher import environment

from benchmarks import cases, docs_page, sides, start
from benchmarks.__main__ import main
from benchmarks.cases import ALONE, GLOO, MIRRORED, MPICH, TWO_RANKS, Case, Rival
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import CaseResult, Results, RoundResult, Timing, begin, read
from benchmarks.table import FIGURES, tables


@pytest.fixture(autouse=True)
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@pytest.mark.slow
def test_a_tiny_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without TensorFlow's ring, and with a rival that fails."""
    monkeypatch.setitem(
        sides.SIDES, "missing", sides.Side("no_side", "NoSide", lambda *_: [], needs=("no-such",))
    )

    def case(quick: bool, ranks: int) -> Case:
        whole = cases.all_reduce(quick, ranks)
        rivals = [rival for rival in whole.rounds[1].rivals if rival.label != cases.RING]
        rivals.append(Rival("broken", sides.SHARED_MEMORY, "nothing_like_that", ()))
        rivals.append(Rival("the rival", "missing", "all_reduce", (4,)))
        return replace(
            whole, rounds=(whole.rounds[0], replace(whole.rounds[1], rivals=tuple(rivals)))
        )

    monkeypatch.setitem(cases.CASES, "all_reduce", case)
    main(["--quick", "--cases", "all_reduce", "--ranks", "2", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "\n| 2 ranks, ms | 4 B | 1 MiB | CPU s/GB |\n" in shown
    assert "the rival: not installed: no-such; pip install" in shown
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["versions"]["tensorflow"] and results["machine"]["cores"] > 0
    timings = {timing["rival"]: timing for timing in results["cases"][0]["rounds"][1]["timings"]}
    assert re.search("rank 1: .*nothing_like_that", timings.pop("broken")["error"])
    assert list(timings) == [cases.FUNCTION, cases.EAGER, MIRRORED, GLOO, MPICH, "the rival"]
    for rival, timing in timings.items():
        missing = (timing["error"] or "").startswith("not installed")
        assert missing == (not timing["seconds"])
        assert not missing or rival in (GLOO, MPICH, "the rival")


def test_what_a_start_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        start, "_SCRIPT", "import time; print('first step', time.time(), 42, flush=True)"
    )
    seconds, megabytes = (each.timings for each in start.measure(2, 1, tmp_path).rounds)
    assert [timing.rival for timing in seconds if timing.seconds[0] > 0] == [
        "TensorFlow alone",
        "npurun",
    ]
    assert [timing.seconds for timing in megabytes] == [[42.0], [42.0]]


def _results(case: str, label: str, *timings: Timing) -> Results:
    results = begin()
    results.cases.append(CaseResult(case, "a case", 2, [RoundResult(label, 8, 5, list(timings))]))
    return results


def test_tables() -> None:
    """They have ratios and errors, and compare in pairs, turn by turn, what differs little."""
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
    plain = [0.1, 0.2, 0.3, 0.4]
    timings = [Timing("untraced", plain), Timing("traced", [seconds * 1.01 for seconds in plain])]
    text = tables(_results("checks", "mlp, traced", *timings))
    assert "| MLP, traced, ms | 250 (100–400) | 252 (101–404) | +1.0% ± 0.0% |" in text, text
    results = _results(
        "faster", "mlp", Timing(cases.ONE_PROCESS, [0.04]), Timing(TWO_RANKS, [0.02])
    )
    assert f"| {TWO_RANKS} | 400 |" in tables(results)
    assert "two ranks process 2.00 (MLP) times the samples per second" in FIGURES["summary"](
        results
    )


@pytest.mark.slow
def test_processes_that_end_are_reported_and_the_others_ended(tmp_path: Path) -> None:
    processes = ProcessSet(sides.TENSORFLOW, 2, tmp_path)
    try:
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
        assert docs_page.filled(text, results) == text, (
            f"python -m benchmarks --write-docs would change {page.name}"
        )
        guide = page.stem not in ("benchmarks", "notes", "architecture", "environment", "options")
        loose = re.sub(r"```.*?```", "", docs_page.PLACE.sub("", text), flags=re.DOTALL)
        assert not guide or not re.findall(r".*\d (?:GB/s|times as (?:fast|long))\b.*", loose), (
            page.name
        )
    assert sorted(places) == sorted([*FIGURES, "chart"])


def test_results_of_another_version_or_commit_are_left_out(tmp_path: Path) -> None:
    results, other = (_results(case, "step", Timing(ALONE, [0.1])) for case in ("resnet50", "bert"))
    assert [case.case for case in other.with_others_of(results).cases] == ["resnet50", "bert"]
    results.write(tmp_path / "results.json")
    assert read(tmp_path / "results.json") == results
    page = "before\n<!-- figures: steps -->\nold\n<!-- end of figures -->\nafter\n"
    assert "| no communication | 100 |" in docs_page.filled(page, results)
    results.version, results.commit = "0.1.0", "another"
    results.write(tmp_path / "results.json")
    empty = page.replace("old\n", "")
    assert read(tmp_path / "results.json") is None
    assert (
        docs_page.filled(docs_page.filled(page, begin()), None)
        == docs_page.filled(page, begin())
        == empty
    )
    assert other.with_others_of(results) is other


@pytest.mark.slow
def test_without_a_gpu_the_benchmark_of_gpus_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--gpu", "--output", str(tmp_path)])
    shown = capsys.readouterr().err
    assert "sees no GPU" in shown and "--on-cpu" in shown
