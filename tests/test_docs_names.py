"""docs/compatibility.md is true: names that it calls there can be imported, the others not, and none is missing. The
English of all pages follows the rules.
"""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import prose
import pytest

import npu_device

PAGE = (Path(__file__).parent.parent / "docs" / "compatibility.md").read_text()
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
