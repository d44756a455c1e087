"""The report as one self-contained HTML page with the timeline of an iteration on all ranks: no scripts, no fonts,
nothing from the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from npu_device._src.report import summary
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


def timeline(traces: Sequence[RankTrace], number: int) -> str:
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


def legend() -> str:
    """Return the legend of the colours, as HTML."""
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
    """Return round numbers from 0."""
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


_SHOWN = 16

_STYLE = """
body { margin: 0; background: #f4f6f9; color: #1f2733; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 10px; }
p { margin: 0 0 8px; }
.small, .legend { color: #5b6675; font-size: 13px; }
section { background: #ffffff; border: 1px solid #e1e6ee; border-radius: 10px; padding: 18px 22px; margin-top: 16px; }
.verdict { border-left: 6px solid #d64545; }
.verdict.good { border-left-color: #3c9a62; }
.verdict h2 { font-size: 19px; }
pre { background: #1f2733; color: #e9eef6; padding: 12px 14px; border-radius: 6px; overflow-x: auto; margin: 10px 0; }
svg { display: block; width: 100%; height: auto; font-size: 12px; fill: #5b6675; }
svg .grid { stroke: #e7ebf1; }
svg .end { stroke: #1f2733; stroke-width: 1.2; stroke-dasharray: 4 3; }
svg .rank { font-weight: 600; font-size: 13px; fill: #1f2733; }
svg .host { font-size: 11px; }
.legend { margin-top: 10px; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid #e7ebf1; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
th { font-weight: 600; font-size: 13px; color: #5b6675; }
"""


def page(found: Analysis) -> str:
    """Return the text of the page."""
    shown = _to_show(found)
    left_out = len(found.traces) - len(shown)
    more = f" {left_out} further ranks are not drawn." if left_out else ""
    sections = [
        f"<h1>Iteration trace</h1><p>{escape(summary.headline(found))}</p>",
        f'<p class="small">{"<br>".join(map(escape, summary.notes(found)))}</p>',
        _verdict(found),
        f"<section><h2>Iteration {found.shown}, of median length</h2>{timeline(shown, found.shown)}"
        f'{legend()}<p class="small">The dashed line is the end of backward; white marks show when each '
        "gradient was ready. Forward is drawn up to the first of them. Pause the pointer on a bar for its figures."
        f"{more}</p></section>",
        _table(found),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Iteration trace</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _to_show(found: Analysis) -> Sequence[RankTrace]:
    """Return all ranks, or the first ones and the slowest."""
    if len(found.traces) <= _SHOWN:
        return found.traces
    last = found.slowest.rank if found.slowest is not None else found.traces[0].rank
    first = [trace for trace in found.traces if trace.rank != last][: _SHOWN - 1]
    return sorted((*first, *(trace for trace in found.traces if trace.rank == last)), key=lambda trace: trace.rank)


def _verdict(found: Analysis) -> str:
    diagnosis = found.diagnosis
    call = ""
    if diagnosis.call is not None:
        call = f"<p>Paste before the first step:</p><pre>{escape(diagnosis.call)}</pre>"
    kind = "verdict good" if diagnosis.good else "verdict"
    return (
        f'<section class="{kind}"><h2>{escape(diagnosis.situation)}</h2><p>{escape(diagnosis.reasons)}</p>{call}'
        f'<p class="small">{escape(diagnosis.expectation)}</p></section>'
    )


def _table(found: Analysis) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("rank", *summary.COLUMNS, "host"))
    rows = "".join(
        f"<tr><td>{rank.rank}</td>{''.join(f'<td>{part / 1e3:.1f}</td>' for part in summary.parts(rank))}"
        f"<td>{escape(rank.host)}</td></tr>"
        for rank in found.ranks
    )
    words = escape(f"{_sentence(summary.waiting(found))} {_sentence(summary.spread(found))}")
    table = f"<table><tr>{head}</tr>{rows}</table>"
    return f'<section><h2>Milliseconds, by rank; medians</h2>{table}<p class="small">{words}</p></section>'


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
