"""docs/compatibility.md is true: names that it calls there can be imported, the others not, and none is missing. The
English of all pages follows the rules. docs/messages.md lists every message with a remedy, below its family.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import messages
import prose
import pytest

import npu_device

DOCS = Path(__file__).parent.parent / "docs"
PAGE, MESSAGES = ((DOCS / name).read_text() for name in ("compatibility.md", "messages.md"))
ROW = re.compile(r"^\| (?P<names>`(?:npu_device|hccl|npu_bridge)\..*?) \| (?P<status>[^|]*) \|", re.MULTILINE)
NAMES = [(name, row["status"]) for row in ROW.finditer(PAGE) for name in re.findall(r"`([\w.]+)`", row["names"])]


def is_there(name: str) -> bool:
    """Return True for a dotted name that ``from a.b import c`` would find."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_page_has_rows() -> None:
    names = [name for name, _ in NAMES]
    assert len(names) > 150
    assert sorted(names) == sorted(set(names))
    assert {status for _, status in NAMES} == {"works", "accepted without effect", "refused", "not there"}


def test_the_status_is_true() -> None:
    assert not [f"{name}: {status}" for name, status in NAMES if is_there(name) == (status == "not there")]


def test_every_public_name_has_a_row() -> None:
    listed = {name for name, _ in NAMES}
    assert not [name for name in npu_device.__all__ if f"npu_device.{name}" not in listed]


def test_the_english_of_pages_follows_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().err


def quoted() -> list[str]:
    """Return what the hand-written parts of the page, ``differs.md`` and the tutorials quote of messages."""
    by_hand = re.sub(r"```text\n.*?```", "", MESSAGES, flags=re.DOTALL) + (DOCS / "differs.md").read_text()
    found = [text for text in re.findall(r'"([^"]+)"', by_hand) if text.count(" ") > 1]
    for page in (DOCS / "tutorials").glob("*.md"):
        found += [block.splitlines()[0] for block in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)]
    return found


def test_the_page_has_every_message() -> None:
    assert messages.written(MESSAGES) == MESSAGES, "run: make docs"


def test_the_page_is_found_by_words_of_messages() -> None:
    assert "\nthe ranks were given different data\n" in MESSAGES
    assert sum(map(len, messages.openings().values())) > 150


def plain(text: str) -> str:
    """Return a text without values."""
    return re.sub(r"…|\b\d+\b|\bAdam\b|^\w*Error: ", "", " ".join(text.split()))


def test_what_is_quoted_is_in_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in messages.SOURCE.rglob("*.py")]
    code = "\n".join(plain(text) for tree in trees for text in messages.texts(tree))
    assert len(quoted()) > 10
    assert not [text for text in quoted() if plain(text) not in code]
