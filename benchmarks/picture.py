"""The results as a picture: bandwidth by size, and the steps as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import CaseResult, Results


def draw(results: Results, path: Path) -> None:
    """Write a PNG with one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results.cases), squeeze=False, figsize=(9, 3.6 * len(results.cases)), layout="constrained"
    )
    for panel, case in zip(axes[:, 0], results.cases):
        panel.set_title(f"{case.title}, {case.ranks} ranks")
        if len(case.rounds) > 1:
            _bandwidths(panel, case)
        else:
            _steps(panel, case)
    figure.supxlabel(f"{results.machine.line()}, {results.date}", fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bandwidths(panel: Any, case: CaseResult) -> None:
    for timing in case.rounds[0].timings:
        medians = [(one_round.size, one_round.median(timing.rival)) for one_round in case.rounds]
        points = [(size, size / median / 1e9) for size, median in medians if median is not None]
        panel.plot([size for size, _ in points], [speed for _, speed in points], marker="o", label=timing.rival)
    panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s (bytes / time)")
    panel.grid(alpha=0.3)
    panel.legend()


def _steps(panel: Any, case: CaseResult) -> None:
    shown = [(timing.rival, timing.median) for timing in case.rounds[0].timings if timing.median is not None]
    bars = panel.barh([rival for rival, _ in shown], [median * 1000 for _, median in shown])
    panel.bar_label(bars, fmt="%.0f", padding=2)
    panel.margins(x=0.1)
    panel.invert_yaxis()
    panel.set_xlabel("ms a step")
