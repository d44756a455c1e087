"""The results as a picture: bandwidth by size, and the steps as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import BY_SIZE, STEPS
from benchmarks.results import CaseResult, Results


def draw(results: Results, path: Path) -> None:
    """Write a PNG with a panel for each case that compares rivals; nothing when there is none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in results.cases if case.shows in (BY_SIZE, STEPS)]
    if not cases:
        path.unlink(missing_ok=True)  # an earlier run's
        return
    figure, axes = pyplot.subplots(len(cases), squeeze=False, figsize=(9, 3.8 * len(cases)), layout="constrained")
    for panel, case in zip(axes[:, 0], cases):
        panel.set_title(f"{case.title}, {case.ranks} ranks")
        (_bandwidths if case.shows == BY_SIZE else _steps)(panel, case)
    figure.supxlabel(f"{results.machine.line()}, {results.date}", fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bandwidths(panel: Any, case: CaseResult) -> None:
    for rival in case.rivals():
        medians = [(one_round.size, one_round.median(rival)) for one_round in case.rounds]
        points = [(size, size / median / 1e9) for size, median in medians if median is not None]
        if points:
            panel.plot([size for size, _ in points], [speed for _, speed in points], marker="o", label=rival)
    panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s (bytes / time)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def _steps(panel: Any, case: CaseResult) -> None:
    shown = [(timing.rival, timing.median) for timing in case.rounds[0].timings if timing.median is not None]
    bars = panel.barh([rival for rival, _ in shown], [median * 1000 for _, median in shown])
    panel.bar_label(bars, fmt="%.0f", padding=2)
    panel.margins(x=0.1)
    panel.invert_yaxis()
    panel.set_xlabel("ms per step")
