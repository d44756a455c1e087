"""``python -m benchmarks``: a tiny run works, its tables have their rows, and a rival that fails is reported."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launcher import environment

from benchmarks import cases, cores, docs_page, sides, speed, start
from benchmarks.__main__ import main
from benchmarks.cases import ALONE, GLOO, MIRRORED, MPICH, TWO_RANKS, Case, Rival
from benchmarks.cores import APART, SHARED, UNKNOWN
from benchmarks.measuring import CaseTimings
from benchmarks.process_set import ProcessSet, RivalError
from benchmarks.results import CaseResult, Results, RoundResult, Timing, begin, read
from benchmarks.table import FIGURES, setup, tables


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

    def smaller(quick: bool, ranks: int) -> Case:
        whole = cases.all_reduce(quick, ranks)
        rivals = [rival for rival in whole.rounds[1].rivals if rival.label != cases.RING]
        rivals.append(Rival("broken", sides.SHARED_MEMORY, "nothing_like_that", ()))
        rivals.append(Rival("the rival", "missing", "all_reduce", (4,)))
        return replace(
            whole, rounds=(whole.rounds[0], replace(whole.rounds[1], rivals=tuple(rivals)))
        )

    monkeypatch.setitem(cases.CASES, "all_reduce", smaller)
    main(["--quick", "--cases", "all_reduce", "--ranks", "2", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    present = {
        case["cores"] for case in json.loads((tmp_path / "results.json").read_text())["cases"]
    }
    assert present in ({SHARED, APART}, {UNKNOWN})
    for state in present:
        assert f"\n| 2 ranks, {state}, ms | 4 B | 1 MiB | CPU s/GB |\n" in shown
    assert "the rival: not installed: no-such; pip install" in shown
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["versions"]["tensorflow"] and results["machine"]["cores"] > 0
    rivals = [cases.FUNCTION, cases.EAGER, MIRRORED, GLOO, MPICH, "the rival"]
    timed: set[str] = set()
    for case in results["cases"]:
        timings = {timing["rival"]: timing for timing in case["rounds"][1]["timings"]}
        assert re.search("rank 1: .*nothing_like_that", timings.pop("broken")["error"])
        assert list(timings) == rivals
        for rival, timing in timings.items():
            missing = (timing["error"] or "").startswith("not installed")
            assert not missing or rival in (GLOO, MPICH, "the rival")
            assert not missing or not timing["seconds"]
            if timing["seconds"] or missing:
                timed.add(rival)
    # The cores may change their state amid a repetition, whose timing then counts for none.
    assert {"the rival"} < timed <= set(rivals)


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
    rounds = [RoundResult(label, 8, 5, list(timings))]
    results.cases.append(CaseResult(case, "a case", 2, rounds, SHARED, 62.0))
    return results


def test_tables() -> None:
    """They have ratios and errors, and compare in pairs, turn by turn, what differs little."""
    timings = [
        Timing(cases.FUNCTION, [0.1, 0.3, 0.1]),
        Timing("npu_device, 4 segments", [0.2, 0.2, 0.4]),
        Timing("npu_device, 8 segments", [0.2], "rank 1: its process ended"),
        Timing(MIRRORED, [0.5, 0.4, 0.3]),
    ]
    text = tables(_results("resnet50", "step", *timings))
    assert "| npu_device, 4 segments | 2.00 |" in text, text
    assert "| npu_device, 8 segments | failed |" in text, text
    assert "* a case, step, npu_device, 8 segments: rank 1: its process ended" in text
    plain = [0.1, 0.2, 0.3, 0.4]
    timings = [Timing("untraced", plain), Timing("traced", [seconds * 1.01 for seconds in plain])]
    text = tables(_results("checks", "mlp, traced", *timings))
    assert "| MLP, traced | shared cache |  |  | +1.0% ± 0.0% |" in text, text
    results = _results(
        "faster", "mlp", Timing(cases.ONE_PROCESS, [0.04]), Timing(TWO_RANKS, [0.02])
    )
    assert f"| {TWO_RANKS} | 400 |" in tables(results)
    assert "| 200 | 400 | **2.00×** | not measured |" in FIGURES["summary"](results)


def test_a_state_of_the_cores_that_did_not_occur_was_not_measured() -> None:
    usual = Timing(cases.FUNCTION, [0.1])
    results = _results("resnet50", "step", usual, Timing(MIRRORED, [0.2]))
    rounds = [RoundResult("step", 8, 5, [Timing(cases.FUNCTION), Timing(MIRRORED)])]
    results.cases.append(CaseResult("resnet50", "a case", 2, rounds, APART))
    text = tables(results)
    assert "| time of a step, shared cache | a case |" in text
    assert f"| {MIRRORED} | 2.00 |" in text
    assert "| time of a step, no shared cache | a case |" in text
    assert f"| {MIRRORED} | not measured |" in text
    assert "A value takes 62 ns (shared cache) from one core to another and back." in " ".join(
        text.split()
    )


def test_timings_count_for_the_state_of_the_cores_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = cores.Distance(SHARED, 62.0), cores.Distance(APART, 331.0)
    looks = iter([near, near, near, far, far])
    monkeypatch.setattr(cores, "measure", lambda: next(looks))
    rival = Rival(ALONE, sides.SHARED_MEMORY, "training", ())
    one_round = cases.Round("step", 8, 1, (rival,))
    timings = CaseTimings(Case("a", "a case", (one_round,)))
    timings.look()
    for seconds in (1.0, 2.0, 3.0):  # the cores change during the second one
        timings.add(one_round, rival, [(seconds, 0.5), (seconds / 2, 0.5)])
    assert timings.of(SHARED, one_round, rival).seconds == [1.0]
    assert timings.of(APART, one_round, rival).seconds == [3.0]
    assert timings.lacking(one_round, [rival], 1) == []
    assert timings.lacking(one_round, [rival], 2) == [SHARED, APART]
    shared, apart = timings.results(2)
    assert (shared.nanoseconds, apart.nanoseconds) == (62.0, 331.0)


@pytest.mark.parametrize("compiler", ["C", "Python"])
def test_the_distance_of_the_cores(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "Python":
        monkeypatch.setattr(cores, "_program", lambda: None)
    distance = cores.measure()
    if distance.nanoseconds is None:
        assert distance.state == UNKNOWN and len(os.sched_getaffinity(0)) == 1
    else:
        assert distance.state in (SHARED, APART) and 10 < distance.nanoseconds < 1e6


@pytest.mark.slow
def test_processes_that_end_are_reported_and_the_others_ended(tmp_path: Path) -> None:
    processes = ProcessSet(sides.TENSORFLOW, 2, tmp_path)
    try:
        processes.ask("prepare", "key", "all_reduce", (4, False))
        assert all(min(both) > 0 for both in processes.ask("measure", "key", 1))
        started = time.monotonic()
        processes.processes[1].kill()
        with pytest.raises(RivalError, match="rank 1: its process ended"):
            processes.ask("measure", "key", 1)
        with pytest.raises(RivalError, match="were ended before"):
            processes.ask("measure", "key", 1)
        assert time.monotonic() - started < 40
        assert all(process.poll() is not None for process in processes.processes)
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


Work = tuple[Any, ...]
"""What a rival does: its processes, its step, the ranks and the network between hosts."""


def works() -> dict[Work, list[tuple[str, int, str, str]]]:
    """Return where each work is measured: case, ranks, round and rival."""
    places: dict[Work, list[tuple[str, int, str, str]]] = {}
    for name, ranks in cases.FULL:
        if name == cases.START:
            continue
        for each in cases.CASES[name](False, ranks).rounds:
            for rival in each.rivals:
                arguments = rival.arguments
                if rival.method == "reading" and len(arguments) < 3:
                    arguments = (*arguments, "tf_keras")  # the default
                many = 1 if rival.side == sides.ONE_PROCESS else ranks
                between = each.gbit if rival.side.endswith("of_hosts") else None
                work = (rival.side, rival.method, arguments, many, between)
                where = (name, ranks, each.label, rival.label)
                places.setdefault(work, []).append(where)
    return {work: found for work, found in places.items() if len({*found}) > 1}


def test_no_two_figures_show_the_time_of_one_work() -> None:
    """Two cases may measure the same; then only one of them has its time on the pages."""
    results = read(docs_page.RESULTS)
    assert results is not None
    for each in [each for case in results.cases for each in case.rounds]:
        for timing in each.timings:
            timing.seconds = [1e6] * len(timing.seconds)
    found = works()
    assert len(found) > 5
    for work, places in found.items():
        shown = set()
        for case, ranks, label, rival in {*places}:
            changed = copy.deepcopy(results)
            for result in changed.of(case):
                for each in result.rounds if result.ranks == ranks else ():
                    timing = each.timing(rival)
                    if each.label == label and timing is not None and timing.seconds:
                        timing.seconds = [0.777]
                        times = {"777", f"{float(f'{each.size / 0.777:.3g}'):g}"}
                        texts = [figure(changed) for figure in FIGURES.values()]
                        if any(set(re.findall(r"[\d.]+", text)) & times for text in texts):
                            shown.add((case, label, rival))
        assert len(shown) < 2, f"{work}: {sorted(shown)}"


def test_results_of_another_version_are_left_out_and_those_of_another_commit_named(
    tmp_path: Path,
) -> None:
    results, other = (
        _results(case, "step", Timing(cases.FUNCTION, [0.1])) for case in ("resnet50", "bert")
    )
    assert [case.case for case in other.with_others_of(results).cases] == ["resnet50", "bert"]
    results.write(tmp_path / "results.json")
    assert read(tmp_path / "results.json") == results
    page = "before\n<!-- figures: steps -->\nold\n<!-- end of figures -->\nafter\n"
    assert "| npu_device | 1.00 |" in docs_page.filled(page, results)
    results.commit = "another"
    merged = other.with_others_of(results)
    assert [case.earlier for case in merged.cases] == [results.run, ""]
    assert f"Measured before, on {results.date}, commit another: " in " ".join(
        setup(merged).split()
    )
    results.machine = dataclasses.replace(results.machine, cpu="another kind")
    (marked, _) = [case.earlier for case in other.with_others_of(results).cases]
    assert marked == f"{results.run}, {results.machine.cores} cores of another kind"
    results.version = "0.1.0"
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


def test_the_cases_that_may_gain_are_functions_of_their_script() -> None:
    body = ast.parse(speed.SCRIPT.read_text()).body
    assert {*speed.CASES} <= {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_gains_name_their_machine() -> None:
    line = {"samples_per_second": 100.0, "steps_per_second": 10.0}
    both = {"ranks": 2, "ratio": 1.5, "low": 1.4, "high": 1.6, "verdict": "", **line}
    page = {"date": "2026-01-02", "processor": "2 cores of another kind"}
    page["speed"] = {"speedups": [line, both]}  # type: ignore[assignment]
    found = speed.found_gains({"python_in_the_step, Keras 3": page})
    alone, two = (Timing(name, [0.1]) for name in (cases.ONE_PROCESS, TWO_RANKS))
    results = replace(_results("faster", "resnet50", alone, two), gains=found)
    text = FIGURES["gains"](results)
    assert text.startswith("Measured on 2026-01-02, 2 cores of another kind.\n\n| samples")
    assert "| 100 | 100 | **1.50×** (1.40–1.60) | undecided |" in text
    assert "Keras 3, one host of 2 cores of another kind | 100 | 100 |" in FIGURES["summary"](
        results
    )


def test_a_row_of_a_case_that_may_gain() -> None:
    lines = [
        {"samples_per_second": 100.0, "steps_per_second": 10.0},
        {
            "samples_per_second": None,
            "steps_per_second": 15.0,
            "ratio": 1.5,
            "low": 1.4,
            "high": 1.6,
        },
    ]
    lines[1]["verdict"] = "faster"  # type: ignore[assignment]
    row = speed.row_of_case("case", {"problem": "", "speedups": lines, "lost_cores": 0.5})
    assert row == "| case | 100 | 15 | 1.50 (1.40–1.60) | faster; others took 0.5 cores |"
