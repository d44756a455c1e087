"""The report as one self-contained HTML page: no scripts, no fonts, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from npu_device._src.report import drawing, summary
from npu_device._src.report.analysis import Analysis
from npu_device._src.trace.records import RankTrace

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
    """Return the page's text."""
    shown = _to_show(found)
    left_out = len(found.traces) - len(shown)
    more = f" {left_out} further ranks are not drawn." if left_out else ""
    sections = [
        f"<h1>Iteration trace</h1><p>{escape(summary.headline(found))}</p>",
        f'<p class="small">{"<br>".join(map(escape, summary.notes(found)))}</p>',
        _verdict(found),
        f"<section><h2>Iteration {found.shown}, of median length</h2>{drawing.timeline(shown, found.shown)}"
        f'{drawing.legend()}<p class="small">The dashed line is the end of backward; white marks show when each '
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
