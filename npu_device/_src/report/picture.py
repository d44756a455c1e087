"""The report of a trace as a page, with the picture of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from npu_device._src.report.analysis import Analysis
from npu_device._src.trace.records import Iteration, RankTrace
from npu_device._src.wording import amount

COLOURS = {
    "input wait": "#cbd5e1",
    "forward": "#a5c8f5",
    "backward": "#4f86d9",
    "hidden reduction": "#f2a93b",
    "exposed reduction": "#d64545",
    "update": "#6fbf8b",
    "gather": "#8d6fbf",
}
_PHASES_HEIGHT = 26  # pixels
_LANE_HEIGHT = 14  # pixels
_MOST_LANES = 8  # lanes for simultaneous reductions; the last lane has all others
_TICKS = 8
_SHOWN = 16  # ranks
_STYLE = """
body { max-width: 1160px; margin: 0 auto; padding: 20px; color: #1f2733; font: 15px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; font-size: 13px; }
.step { position: relative; margin-left: 130px; padding-top: 22px; font-size: 12px; }
.step * { position: absolute; }
.rank, .rank small { position: relative; display: block; }
.rank { margin-bottom: 18px; }
.rank > b { left: -130px; width: 120px; overflow: hidden; white-space: nowrap; line-height: 1.2; }
.rank > small { font-weight: normal; }
.rank > i { height: 12px; border-radius: 2px; }
.rank > .end { top: -4px; bottom: 0; width: 0; border-left: 1.2px dashed #1f2733; border-radius: 0; height: auto; }
.tick { top: 0; bottom: 0; border-left: 1px solid #e7ebf1; color: #5b6675; padding-left: 3px; white-space: nowrap; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
"""


def page(analysis: Analysis, text: str) -> str:
    """Return the page: the picture of the iteration of median length on all ranks, or the first ones and the slowest,
    and the text of the report.
    """
    traces = _drawn(analysis)
    iterations = [trace.iterations[analysis.shown] for trace in traces]
    begin = min(iteration.iteration_start for iteration in iterations)
    end = max(iteration.iteration_end for iteration in iterations)
    axis = _Axis(begin, max(end - begin, 1e-3))
    ranks = ""
    for trace, iteration in zip(traces, iterations):
        ranks += _RankPicture(trace, iteration, axis).draw()
    legend = ""
    for phase, colour in COLOURS.items():
        legend += f'<span><i style="background:{colour}"></i>{escape(phase)}</span>'
    omission = ""
    if len(analysis.traces) > len(traces):
        omission = f" {len(analysis.traces) - len(traces)} further ranks are not drawn."
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Iteration trace</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>Iteration {iterations[0].iteration}, of median length</h1>"
        f'<div class="step">{_ticks(axis.length / 1e3)}{ranks}</div><p class="legend">{legend}</p>'
        "<p>The dashed line is the end of backward. White marks show when each gradient was ready. Forward is drawn up "
        f"to the first of them. Pause the pointer on a bar for its figures.{omission}</p>\n"
        f"<pre>{escape(text)}</pre></body></html>\n"
    )


def _drawn(analysis: Analysis) -> list[RankTrace]:
    """Return the traces to draw: of the slowest rank, and of the others as many as fit."""
    # The rank for which the others wait explains the picture best.
    slowest = analysis.busiest.rank
    others = [trace.rank for trace in analysis.traces if trace.rank != slowest]
    ranks = {slowest, *others[: _SHOWN - 1]}
    return [trace for trace in analysis.traces if trace.rank in ranks]


@dataclass(frozen=True)
class _Axis:
    """The times that a picture shows, in microseconds."""

    begin: float
    length: float

    def position(self, time: float) -> str:
        return f"left:{100 * (time - self.begin) / self.length:.2f}%"

    def width(self, start: float, end: float) -> str:
        return f"width:{100 * max(0.0, end - start) / self.length:.2f}%"


class _RankPicture:
    """The picture of an iteration of one rank: its phases, and below them its reductions."""

    def __init__(self, trace: RankTrace, iteration: Iteration, axis: _Axis) -> None:
        self._trace = trace
        self._iteration = iteration
        self._axis = axis
        self._html = [f"<b>rank {trace.rank}<small>{escape(trace.host)}</small></b>"]

    def draw(self) -> str:
        self._draw_phases()
        lanes = self._draw_reductions()
        end = self._axis.position(self._iteration.bp_end)
        self._html.append(f'<i class="end" style="{end}"></i>')
        height = _PHASES_HEIGHT + lanes * _LANE_HEIGHT
        return f'<div class="rank" style="height:{height}px">{"".join(self._html)}</div>'

    def _draw_phases(self) -> None:
        iteration = self._iteration
        # The first gradient is there when backward has begun; no point tells when forward ended.
        backward = min(max(iteration.fp_start, min(iteration.ready)), iteration.bp_end)
        self._phase("input wait", iteration.iteration_start, iteration.fp_start)
        self._phase("forward", iteration.fp_start, backward)
        self._phase("backward", backward, iteration.bp_end)
        update_end = iteration.iteration_end - iteration.gather
        self._phase("update", iteration.reduced, update_end)
        if iteration.gather:
            self._phase("gather", update_end, iteration.iteration_end)
        for ready in iteration.ready:
            position = self._axis.position(ready)
            mark = f"{position};top:16px;width:1px;height:6px;background:#ffffffbf"
            self._html.append(f'<i style="{mark}"></i>')

    def _phase(self, name: str, start: float, end: float) -> None:
        title = f"rank {self._trace.rank}, {name}: {(end - start) / 1e3:.2f} ms"
        self._bar(name, start, end, 0, title, ";height:22px")

    def _draw_reductions(self) -> int:
        """Draw each reduction in the first lane that is free; return the number of lanes."""
        bp_end = self._iteration.bp_end
        intervals = self._iteration.allreduce
        lanes: list[float] = []  # by lane, the time from which it is free
        for segment in sorted(range(len(intervals)), key=intervals.__getitem__):
            start, end = intervals[segment]
            free_lanes = [lane for lane, free_from in enumerate(lanes) if free_from <= start]
            # The highest lane that is free, else a new one below.
            lane = min([*free_lanes, len(lanes), _MOST_LANES - 1])
            lanes[lane : lane + 1] = [end]
            top = _PHASES_HEIGHT + lane * _LANE_HEIGHT
            low, high = self._trace.segments[segment]
            gradients = f"gradients {low} to {high}, {amount(self._trace.bytes_of(segment))}"
            reduction = f"{gradients}, {(end - start) / 1e3:.2f} ms"
            title = f"rank {self._trace.rank}, segment {segment}: {reduction}"
            # A reduction may be hidden at first, and exposed later.
            if start < bp_end:
                self._bar("hidden reduction", start, min(end, bp_end), top, title)
            if end > bp_end:
                self._bar("exposed reduction", max(start, bp_end), end, top, title)
        return len(lanes)

    def _bar(
        self, phase: str, start: float, end: float, top: int, title: str, style: str = ""
    ) -> None:
        box = f"{self._axis.position(start)};{self._axis.width(start, end)};top:{top}px"
        self._html.append(
            f'<i style="{box};background:{COLOURS[phase]}{style}" title="{title}"></i>'
        )


def _ticks(longest: float) -> str:
    """Return lines at round numbers of milliseconds."""
    rough = longest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    ticks = (round(step * index, 9) for index in range(int(longest / step) + 1))
    return "".join(
        f'<div class="tick" style="left:{100 * tick / longest:.2f}%">{tick:g} ms</div>'
        for tick in ticks
    )
