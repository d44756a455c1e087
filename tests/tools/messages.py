"""The messages of the package with a remedy, as they begin; ``python tests/tools/messages.py`` writes them into
``docs/messages.md``, each below the family of the file that has it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "messages.md"
SOURCE = ROOT / "npu_device" / "_src"
WORDS = 8  # of a message's beginning
_BLOCK = re.compile(r"<!-- openings: (?P<paths>[^>]+) -->\n(?:\n```text\n.*?```\n)?", re.DOTALL)
_VALUE = "…"
_FORMATTED = re.compile(r"%[-\d.]*[sdrfg]|\{[^}]*\}")


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield each text of a module, with a sign in the place of a value."""
    for child in ast.iter_child_nodes(tree):
        text = _text(child)
        if text is None:
            yield from texts(child)
        else:
            yield text


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _FORMATTED.sub(_VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or _VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _text(node.left), _text(node.right)
        return None if sides == (None, None) else "".join(side or _VALUE for side in sides)
    return None


def opening(text: str) -> str | None:
    """Return the first words of a message; None for a text without a remedy, and for the end of a message."""
    beginning, remedy, _ = text.partition("What to do")
    words = beginning.replace(f"rank {_VALUE}: ", "", 1).split("\n")[0].split()
    if (
        not remedy
        or not beginning.strip(f"{_VALUE}:;,. \n")
        or beginning.lstrip().startswith("Likely cause")
    ):
        return None
    return " ".join(words[:WORDS]).rstrip(":;,.")


def openings() -> dict[str, list[str]]:
    """Return how messages begin, by file."""
    found = {}
    for path in [*sorted(SOURCE.rglob("*.py")), *sorted((SOURCE.parent / "launch").rglob("*.py"))]:
        begun = {first for text in texts(ast.parse(path.read_text())) if (first := opening(text))}
        if begun:
            name = path.relative_to(SOURCE if SOURCE in path.parents else SOURCE.parent)
            found[name.with_suffix("").as_posix()] = sorted(begun)
    return found


def written(page: str) -> str:
    """Return the page with the messages of each family; LookupError if no family has the messages of a file."""
    families = [match["paths"].split() for match in _BLOCK.finditer(page)]
    lines: dict[str, set[str]] = {}
    for name, begun in openings().items():
        paths = [path for paths in families for path in paths if name.startswith(path)]
        if not paths:
            raise LookupError(f"docs/messages.md has no family for the messages of {name}")
        lines.setdefault(max(paths, key=len), set()).update(begun)

    def block(match: re.Match[str]) -> str:
        shown = sorted({line for path in match["paths"].split() for line in lines.get(path, ())})
        text = "\n".join(shown)
        return f"<!-- openings: {match['paths']} -->\n" + (
            f"\n```text\n{text}\n```\n" if shown else ""
        )

    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
