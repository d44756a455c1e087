"""Who gains from several ranks on one host, and whether ``npurun speed`` is right about it.

    python -m benchmarks.speed gains    a table of all cases, by npurun speed: some 12 to 17 minutes on 2 cores
    python -m benchmarks.speed truth    npurun speed, five times, between runs by hand, ten times 200 steps, since the
                                        cores of a virtual machine change their distance: some 75 minutes
                                        (all figures are off if other programs take cores; it prints how many)
    python -m benchmarks.speed load     20 verdicts with a load on one core, against those of truth: up to 60 minutes

``truth`` and ``load`` end with exit code 1 if a figure is off or a verdict is wrong. Nothing else may run meanwhile.
All keep what they have measured in ``build/benchmarks/speed.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import docs_page
from benchmarks.measuring import progress
from benchmarks.results import Gain, begin, read

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gaining.py"
CASES = (
    "python_in_the_step",
    "pydataset",
    "generator",
    "recurrent",
    "pipeline",
    "several_models",
    "short_epochs",
)
KERAS = {"Keras 3": "0", "tf-keras": "1"}
_TOLERANCE = 0.05
_NPURUN = (sys.executable, "-m", "npu_device.launch")
_HAND = re.compile(r"seconds of a step: ([0-9.]+)")


def measured(case: str, keras: str, ranks: int, minutes: float) -> dict[str, Any]:
    """Return what npurun speed prints about a case, or why it can't measure it."""
    words = ["speed", "-n", str(ranks), "--minutes", f"{minutes:g}", "--json", str(SCRIPT), case]
    done = _run([*_NPURUN, *words], keras, 60 * minutes + 120)
    if done.returncode:
        return {"problem": done.stderr[-500:]}
    return dict(json.loads(done.stdout))


def by_hand(case: str, keras: str, ranks: int, steps: int) -> float:
    """Return the seconds of a step of its slowest rank, in a run as a user starts it; 0.0 if it fails."""
    command = [str(SCRIPT), case, "--by-hand", str(steps)]
    program = [sys.executable]
    if ranks > 1:
        program = [*_NPURUN, "-n", str(ranks)]
    done = _run([*program, *command], keras, 600)
    seconds = [float(text) for text in _HAND.findall(done.stdout)]
    if len(seconds) < ranks:
        progress(f"{case}, {ranks} ranks, by hand: {done.stderr[-500:]}")
        return 0.0
    return max(seconds)


def _run(command: Sequence[str], keras: str, seconds: float) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "TF_USE_LEGACY_KERAS": KERAS[keras],
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        command,
        env=variables,
        timeout=seconds,
        check=False,
        text=True,
        capture_output=True,
    )


class Notebook:
    """What has been measured, by case and Keras, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.pages: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.pages = json.loads(path.read_text())

    def note(self, key: str, **figures: Any) -> dict[str, Any]:
        """Add figures of today and of this machine, and return all of a key."""
        page = self.pages.setdefault(key, {})
        run = begin()
        page.update(figures, date=run.date, processor=run.machine.processor)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.pages, indent=1))
        return page


def gains(options: argparse.Namespace, notebook: Notebook) -> int:
    """Print who gains, as the table of docs/is_it_for_you.md."""
    print(f"| samples per second | one process, all cores | {options.ranks} ranks | speedup | |")
    print("|---|--:|--:|--:|---|", flush=True)
    for case, keras in _chosen(options):
        report = measured(case, keras, options.ranks, options.minutes or 3)
        notebook.note(f"{case}, {keras}", speed=report)
        print(row_of_case(f"{case}, {keras}", report), flush=True)
    if options.write_docs:
        results = read(docs_page.RESULTS) or begin()
        docs_page.write(replace(results, gains=found_gains(notebook.pages)))
    return 0


def found_gains(pages: dict[str, dict[str, Any]]) -> list[Gain]:
    """Return what was measured, case by case."""
    found = []
    for name, page in pages.items():
        case, _, keras = name.partition(", ")
        if page["speed"].get("problem"):
            continue
        single, together = page["speed"]["speedups"]
        rates = [
            line["samples_per_second"] or line["steps_per_second"] for line in (single, together)
        ]
        gain = Gain(
            case=case,
            keras=keras,
            ranks=together["ranks"],
            single=rates[0],
            together=rates[1],
            ratio=together["ratio"],
            low=together["low"],
            high=together["high"],
            verdict=together["verdict"] or "undecided",
            date=page["date"],
            processor=page["processor"],
        )
        found.append(gain)
    return found


def row_of_case(name: str, report: dict[str, Any]) -> str:
    if report.get("problem"):
        return f"| {name} | {report['problem']!r} |"
    single, both = report["speedups"]
    rates = [
        f"{line['samples_per_second'] or line['steps_per_second']:.3g}" for line in (single, both)
    ]
    spread = f"{both['ratio']:.2f} ({both['low']:.2f}–{both['high']:.2f})"
    verdict = both["verdict"] or "undecided"
    lost = f"; others took {report['lost_cores']:.1f} cores" * (report["lost_cores"] >= 0.1)
    return f"| {name} | {rates[0]} | {rates[1]} | {spread} | {verdict}{lost} |"


def truth(options: argparse.Namespace, notebook: Notebook) -> int:
    """Compare speedups with those of runs by hand, in turn with the runs of npurun speed."""
    code = 0
    for case, keras in _chosen(options):
        reports = []
        hand_seconds = []
        for number in range(2 * options.rounds):
            # By hand before and after, since cores become faster and slower within minutes.
            if number % 2:
                reports.append(measured(case, keras, options.ranks, options.minutes or 1))
            single = by_hand(case, keras, 1, options.steps)
            together = by_hand(case, keras, options.ranks, options.steps)
            if single and together:
                hand_seconds.append((single, together))
        ratios = [single / together for single, together in hand_seconds]
        problems = [report["problem"] for report in reports if report.get("problem")]
        if problems or not ratios:
            print(f"{case}, {keras}: not measured: {problems}", flush=True)
            code = 1
            continue
        by_speed = [report["speedups"][1]["ratio"] for report in reports]
        speed_seconds = [
            [1 / line["steps_per_second"] for line in report["speedups"]] for report in reports
        ]
        off = statistics.median(by_speed) / statistics.median(ratios) - 1
        notebook.note(f"{case}, {keras}", speed=reports[-1], by_speed=by_speed, by_hand=ratios)
        is_off = abs(off) > _TOLERANCE
        code = max(code, int(is_off))
        lost = max(report["lost_cores"] for report in reports)
        print(
            f"{case}, {keras}: npurun speed {_spread(by_speed)}, by hand {_spread(ratios)}: off by {off:+.1%}"
            f"{' WRONG' * is_off}; other programs took up to {lost:.1f} cores; a step takes"
            f" {_step_times(speed_seconds)}, by hand {_step_times(hand_seconds)}",
            flush=True,
        )
    return code


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _step_times(seconds: Sequence[Sequence[float]]) -> str:
    """Return how long a step takes in one process, and on the ranks."""
    single, together = (f"{1000 * statistics.median(times):.2f}" for times in zip(*seconds))
    return f"{single} and {together} ms"


def load(options: argparse.Namespace, notebook: Notebook) -> int:
    """Count wrong verdicts while a program takes one core."""
    wrong = 0
    pairs = list(_chosen(options))
    for number in range(options.runs):
        case, keras = pairs[number % len(pairs)]
        page = notebook.pages.get(f"{case}, {keras}", {})
        if not page.get("by_hand"):
            sys.exit(
                f"run python -m benchmarks.speed truth first: nothing is known of {case}, {keras}"
            )
        hand = statistics.median(page["by_hand"])
        with _load():
            report = measured(case, keras, options.ranks, options.minutes or 3)
        verdict = "not measured"
        if not report.get("problem"):
            verdict = report["speedups"][1]["verdict"] or "undecided"
        is_wrong = (verdict == "faster" and hand < 1) or (verdict == "slower" and hand > 1)
        wrong += is_wrong
        ratio = report["speedups"][1]["ratio"] if not report.get("problem") else 0.0
        print(
            f"{number + 1}. {case}, {keras}: {verdict} ({ratio:.2f}; by hand, without load, {hand:.2f})"
            f"{' WRONG' * is_wrong}",
            flush=True,
        )
    print(f"{wrong} of {options.runs} verdicts are wrong")
    return int(wrong > 0)


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """Let a program take the first core."""
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for case in options.cases:
        for keras in options.keras:
            yield case, keras


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = {"gains": gains, "truth": truth, "load": load}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--keras", nargs="+", choices=KERAS, default=["Keras 3"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, help="of each npurun speed (default 3, and 1 for truth)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="of npurun speed, and half of those by hand (default 5)",
    )
    parser.add_argument("--steps", type=int, default=200, help="by hand (default 200)")
    parser.add_argument("--runs", type=int, default=20, help="with a load (default 20)")
    parser.add_argument("--write-docs", action="store_true", help="put the gains into the pages")
    parser.add_argument("--output", type=Path, default=ROOT / "build/benchmarks/speed.json")
    options = parser.parse_args()
    return commands[options.command](options, Notebook(options.output))


if __name__ == "__main__":
    sys.exit(main())
