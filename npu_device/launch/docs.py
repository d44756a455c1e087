"""``npurun docs``: shows the pages that messages name, from the installed package; a clone shows its ``docs/``."""

from __future__ import annotations

import argparse
import difflib
import pydoc
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_INSTALLED = "share/doc/npu_device/*.md"  # the same path as in pyproject.toml


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="npurun docs", description="Show a page of the documentation, or list them."
    )
    parser.add_argument(
        "name", nargs="?", help="name of a page, such as messages; without it, all pages are listed"
    )
    name = parser.parse_args(argv).name
    pages = _pages()
    if not pages:
        print(
            "npurun docs: this installation has no pages. What to do: install npu_device again",
            file=sys.stderr,
        )
        return 1
    if name is None:
        width = max(map(len, pages))
        for page, path in sorted(pages.items()):
            title, *_ = re.findall("^# (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            print(f"{page:{width}}  {title}")
        return 0
    # Accepted as messages name pages, too: docs/NAME.md.
    name = name.rpartition("/")[2].removesuffix(".md")
    if name not in pages:
        similar = difflib.get_close_matches(name, pages, n=3) or sorted(pages)
        print(
            f"npurun docs: there is no page {name!r}. What to do: name one of {', '.join(similar)}",
            file=sys.stderr,
        )
        return 2
    # Shown by a pager, which prints plain text if the output is no terminal.
    pydoc.pager(pages[name].read_text(encoding="utf-8"))
    return 0


def _pages() -> dict[str, Path]:
    clone = Path(__file__).parents[2] / "docs"
    if (clone / "index.md").is_file():
        # A page of the clone is newer than the page of an installed version.
        paths = [*clone.glob("*.md"), *clone.glob("tutorials/*.md")]
    else:
        installed = metadata.files("npu_device") or ()
        paths = [Path(str(file.locate())) for file in installed if file.match(_INSTALLED)]
    return {path.stem: path for path in paths if path.stem != "index"}
