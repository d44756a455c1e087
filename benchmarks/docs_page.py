"""Figures in README and ``docs/``: between two comments that name them, filled from ``benchmarks/results.json``.

A figure that wasn't measured with the present version isn't shown.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import table
from benchmarks.results import FILE, Results, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / FILE
CHART = ROOT / "docs" / "benchmarks.svg"
PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_CHART_TEXT = "![time of steps on one host, divided by that of npu_device](benchmarks.svg)"


def pages() -> list[Path]:
    """Return the pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(page: str, results: Results | None) -> str:
    """Return a page with the figures of these results in its places.

    Raises:
        KeyError: the page names a figure that there isn't.
    """
    figures = {**table.FIGURES, "chart": lambda found: _CHART_TEXT if table.chart(found) else ""}

    def text(place: re.Match[str]) -> str:
        figure = figures[place[2]]
        found = figure(results) if results is not None else ""
        return f"{place[1]}\n{found}\n\n{place[3]}" if found else place[1] + place[3]

    return PLACE.sub(text, page)


def write(results: Results) -> None:
    """Keep the results, with those of other cases of the same machine, day and commit, and fill all pages."""
    results = results.with_others_of(read(RESULTS))
    results.write(RESULTS)
    for page in pages():
        page.write_text(filled(page.read_text(), results))
    CHART.write_text(table.chart(results))
