"""The generated part of ``docs/benchmarks.md``."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_BEGIN = "<!-- results: written by `python -m benchmarks --write-docs`, changes are lost -->"
_END = "<!-- end of results -->"


def replace_results(page: str, tables: str) -> str:
    """Return the page with these tables in place of its old ones.

    Raises:
        ValueError: the page lacks the comments that mark the place.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page should have the lines {_BEGIN!r} and {_END!r} around the results")
    return f"{before}{_BEGIN}\n\n{tables.strip()}\n\n{_END}{after}"
