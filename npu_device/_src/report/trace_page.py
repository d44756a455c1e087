"""The picture of a step: one iteration on all ranks, in an HTML page with the text of the report. It loads nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
"""The meaning of each colour."""

_WIDTH, _LEFT, _RIGHT = 1080, 130, 20
_ROW, _LANE, _LANES = 22, 12, 8
_TICKS = 8


def _timeline(traces: Sequence[RankTrace], number: int) -> str:
    """Draw one iteration on all ranks, with each segment."""
    ones = [next(one for one in trace.iterations if one.iteration == number) for trace in traces]
    begin = min(one.begin for one in ones)
    scale = _Scale((max(one.iteration_end for one in ones) - begin) / 1e3)
    parts: list[str] = []
    y = 30.0
    for trace, one in zip(traces, ones):
        parts.append(_label(y + 15, f"rank {trace.rank}", trace.host))
        height = _rank(parts, trace, one, begin, scale, y)
        x = scale.x((one.bp_end - begin) / 1e3)
        parts.append(f'<line class="end" x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x:.1f}" y2="{y + height:.1f}"/>')
        y += height + 18
    return _svg(y + 8, f"Iteration {number}", [*scale.axis(y - 6), *parts])


def _legend() -> str:
    marks = (f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in COLOURS.items())
    return f'<p class="legend">{"".join(marks)}</p>'


def _rank(parts: list[str], trace: RankTrace, one: Iteration, begin: float, scale: _Scale, y: float) -> float:
    """Draw a rank; return the height that it takes."""
    first = min(max(one.fp_start, min(one.ready)), one.bp_end)
    reduced = max(one.bp_end, one.last_reduced)
    phases = [
        ("input wait", one.begin, one.fp_start),
        ("forward", one.fp_start, first),
        ("backward", first, one.bp_end),
        ("update", reduced, one.iteration_end),
    ]
    for kind, start, end in phases:
        text = f"rank {trace.rank}, {kind}: {(end - start) / 1e3:.2f} ms"
        parts.append(_bar(scale, (start - begin) / 1e3, (end - begin) / 1e3, y, _ROW, kind, text))
    # The time when each gradient was ready, in one path: there may be hundreds.
    marks = " ".join(f"M{scale.x((ready - begin) / 1e3):.1f} {y + _ROW - 6:.1f}v6" for ready in one.ready)
    parts.append(f'<path d="{marks}" stroke="#ffffff" stroke-opacity="0.75" stroke-width="1" fill="none"/>')
    lanes: list[float] = []
    for segment in sorted(range(len(one.allreduce)), key=lambda segment: one.allreduce[segment]):
        start, end = one.allreduce[segment]
        lane = next((lane for lane, free in enumerate(lanes) if free <= start), len(lanes))
        lane = min(lane, _LANES - 1)
        lanes[lane : lane + 1] = [end]
        top = y + _ROW + 4 + lane * (_LANE + 2)
        low, high = trace.segments[segment]
        size = amount(trace.bytes_of(segment))
        text = f"rank {trace.rank}, segment {segment}: gradients {low} to {high}, {size}, "
        text += f"{(end - start) / 1e3:.2f} ms"
        for kind, left, right in (
            ("hidden reduction", start, min(end, one.bp_end)),
            ("exposed reduction", max(start, one.bp_end), end),
        ):
            if left < right:
                parts.append(_bar(scale, (left - begin) / 1e3, (right - begin) / 1e3, top, _LANE, kind, text))
    return _ROW + 4 + len(lanes) * (_LANE + 2)


class _Scale:
    """Milliseconds from left to right."""

    def __init__(self, longest: float) -> None:
        self.longest = max(longest, 1e-6)

    def x(self, milliseconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * milliseconds / self.longest

    def axis(self, height: float) -> list[str]:
        parts = []
        for tick in _ticks(self.longest, _TICKS):
            x = self.x(tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="22" x2="{x:.1f}" y2="{height:.1f}"/>')
            parts.append(f'<text x="{x:.1f}" y="14" text-anchor="middle">{tick:g} ms</text>')
        return parts


def _ticks(longest: float, few: int) -> list[float]:
    rough = longest / few
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(step * number, 9) for number in range(int(longest / step) + 1)]


def _bar(scale: _Scale, start: float, end: float, y: float, height: float, kind: str, text: str) -> str:
    x, width = scale.x(start), max(0.0, scale.x(end) - scale.x(start))
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2" fill="{COLOURS[kind]}"'
    return f"<rect {shape}><title>{escape(text)}</title></rect>"


def _label(y: float, name: str, host: str) -> str:
    short = host if len(host) <= 18 else host[:17] + "…"
    return (
        f'<text class="rank" x="0" y="{y:.1f}">{escape(name)}</text>'
        f'<text class="host" x="0" y="{y + 14:.1f}">{escape(short)}</text>'
    )


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


_SHOWN = 16  # ranks

_STYLE = """
body { max-width: 1160px; margin: 0 auto; padding: 20px; color: #1f2733; font: 15px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; font-size: 13px; }
svg { display: block; width: 100%; height: auto; font-size: 12px; fill: #5b6675; }
svg .grid { stroke: #e7ebf1; }
svg .end { stroke: #1f2733; stroke-width: 1.2; stroke-dasharray: 4 3; }
svg .rank { font-weight: 600; font-size: 13px; fill: #1f2733; }
svg .host { font-size: 11px; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
"""


def page(found: Analysis, text: str) -> str:
    """Return the page: the picture of the iteration of median length, and the text of the report."""
    shown = _to_show(found)
    left_out = len(found.traces) - len(shown)
    more = f" {left_out} further ranks are not drawn." if left_out else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Iteration trace</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>Iteration {found.shown}, of median length</h1>{_timeline(shown, found.shown)}{_legend()}"
        "<p>The dashed line is the end of backward. White marks show when each gradient was ready. Forward is drawn up "
        f"to the first of them. Pause the pointer on a bar for its figures.{more}</p>\n"
        f"<pre>{escape(text)}</pre></body></html>\n"
    )


def _to_show(found: Analysis) -> Sequence[RankTrace]:
    last = found.slowest.rank if found.slowest is not None else 0
    first = [trace.rank for trace in found.traces if trace.rank != last][: _SHOWN - 1]
    return [trace for trace in found.traces if trace.rank in (*first, last)]
