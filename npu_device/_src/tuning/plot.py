"""The chart of ``simulate``: efficiency by number of ranks, as a self-contained SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from npu_device._src.tuning.simulate import Expected

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 52, 56
_COLOURS = {"ring": "#1f6feb", "tree": "#d9480f"}


def svg(rows: Sequence[Expected], title: str) -> str:
    """Return the chart.

    Args:
        rows: of ``simulate``; at least two numbers of ranks.
        title: what was simulated.
    """
    most = max(row.ranks for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#24292f">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="28" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for ranks in sorted({row.ranks for row in rows}):
        x = _x(ranks, most)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{ranks:,}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 16}" text-anchor="middle">ranks</text>')
    legend = _TOP + 8
    for shape in dict.fromkeys(row.shape for row in rows):
        curve = sorted((row for row in rows if row.shape == shape), key=lambda row: row.ranks)
        colour = _COLOURS[shape]
        for name, dashes, values in (
            ("best split", "", [row.efficiency for row in curve]),
            ("default split", ' stroke-dasharray="5 4"', [row.default_efficiency for row in curve]),
        ):
            stroke = f'stroke="{colour}" stroke-width="2"{dashes}'
            points = " ".join(f"{_x(row.ranks, most):.1f},{_y(value):.1f}" for row, value in zip(curve, values))
            parts.append(f'<polyline fill="none" {stroke} points="{points}"/>')
            x = _WIDTH - _RIGHT + 18
            parts.append(f'<line x1="{x}" y1="{legend}" x2="{x + 28}" y2="{legend}" {stroke}/>')
            parts.append(f'<text x="{x + 36}" y="{legend + 4}">{shape}, {name}</text>')
            legend += 20
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _x(ranks: int, most: int) -> float:
    """Return the x position of a number of ranks; doublings are equally spaced."""
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(ranks) / max(1.0, math.log2(most))


def _y(efficiency: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - efficiency)
