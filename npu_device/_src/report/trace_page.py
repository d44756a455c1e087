"""The picture of a step: one iteration on all ranks, in an HTML page with the text of the report. It loads nothing."""

from __future__ import annotations

import math
from html import escape

from npu_device._src.report.analysis import Analysis, amount
from npu_device._src.trace.records import Iteration, RankTrace

COLOURS = {
    "input wait": "#cbd5e1",
    "forward": "#a5c8f5",
    "backward": "#4f86d9",
    "hidden reduction": "#f2a93b",
    "exposed reduction": "#d64545",
    "update": "#6fbf8b",
}
_ROW, _LANE, _LANES, _TICKS = 26, 14, 8, 8
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


def page(found: Analysis, text: str) -> str:
    """Return the page: the picture of the iteration of median length on all ranks, or the first ones and the slowest,
    and the text of the report.
    """
    last = found.slowest.rank if found.slowest is not None else 0
    first = [trace.rank for trace in found.traces if trace.rank != last][: _SHOWN - 1]
    shown = [trace for trace in found.traces if trace.rank in (*first, last)]
    ones = [next(one for one in trace.iterations if one.iteration == found.shown) for trace in shown]
    begin = min(one.begin for one in ones)
    whole = max(max(one.iteration_end for one in ones) - begin, 1e-3)
    ranks = "".join(_rank(trace, one, begin, whole) for trace, one in zip(shown, ones))
    marks = (f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in COLOURS.items())
    more = f" {len(found.traces) - len(shown)} further ranks are not drawn." if len(found.traces) > len(shown) else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Iteration trace</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>Iteration {found.shown}, of median length</h1>"
        f'<div class="step">{_ticks(whole / 1e3)}{ranks}</div><p class="legend">{"".join(marks)}</p>'
        "<p>The dashed line is the end of backward. White marks show when each gradient was ready. Forward is drawn up "
        f"to the first of them. Pause the pointer on a bar for its figures.{more}</p>\n"
        f"<pre>{escape(text)}</pre></body></html>\n"
    )


def _rank(trace: RankTrace, one: Iteration, begin: float, whole: float) -> str:
    """Draw a rank: its phases, and below them its reductions, each in the first lane that is free."""

    def bar(kind: str, start: float, end: float, top: float, more: str) -> None:
        left, width = 100 * (start - begin) / whole, 100 * max(0.0, end - start) / whole
        place = f"left:{left:.2f}%;width:{width:.2f}%;top:{top}px;background:{COLOURS[kind]}" + more
        parts.append(f'<i style="{place}" title="{text}"></i>')

    parts = [f"<b>rank {trace.rank}<small>{escape(trace.host)}</small></b>"]
    first = min(max(one.fp_start, min(one.ready)), one.bp_end)
    for kind, start, end in (
        ("input wait", one.begin, one.fp_start),
        ("forward", one.fp_start, first),
        ("backward", first, one.bp_end),
        ("update", max(one.bp_end, one.last_reduced), one.iteration_end),
    ):
        text = f"rank {trace.rank}, {kind}: {(end - start) / 1e3:.2f} ms"
        bar(kind, start, end, 0, ";height:22px")
    places = (f"left:{100 * (ready - begin) / whole:.2f}%" for ready in one.ready)
    parts += (f'<i style="{place};top:16px;width:1px;height:6px;background:#ffffffbf"></i>' for place in places)
    lanes: list[float] = []
    for segment in sorted(range(len(one.allreduce)), key=lambda segment: one.allreduce[segment]):
        start, end = one.allreduce[segment]
        lane = min(next((lane for lane, free in enumerate(lanes) if free <= start), len(lanes)), _LANES - 1)
        lanes[lane : lane + 1] = [end]
        low, high = trace.segments[segment]
        text = f"rank {trace.rank}, segment {segment}: gradients {low} to {high}, {amount(trace.bytes_of(segment))}, "
        text += f"{(end - start) / 1e3:.2f} ms"
        if start < one.bp_end:
            bar("hidden reduction", start, min(end, one.bp_end), _ROW + lane * _LANE, "")
        if end > one.bp_end:
            bar("exposed reduction", max(start, one.bp_end), end, _ROW + lane * _LANE, "")
    parts.append(f'<i class="end" style="left:{100 * (one.bp_end - begin) / whole:.2f}%"></i>')
    return f'<div class="rank" style="height:{_ROW + len(lanes) * _LANE}px">{"".join(parts)}</div>'


def _ticks(longest: float) -> str:
    """Return lines at round numbers of milliseconds."""
    rough = longest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    ticks = (round(step * number, 9) for number in range(int(longest / step) + 1))
    return "".join(f'<div class="tick" style="left:{100 * tick / longest:.2f}%">{tick:g} ms</div>' for tick in ticks)
