"""docs/compatibility.md is true: names that it calls there can be imported, the others not, and none is missing. The
English of all pages follows the rules.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import prose
import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "compatibility.md").read_text()
ROW = re.compile(r"^\| (?P<names>`(?:npu_device|hccl|npu_bridge)\..*?) \| (?P<status>[^|]*) \|", re.MULTILINE)
NAMES = [(name, row["status"]) for row in ROW.finditer(PAGE) for name in re.findall(r"`([\w.]+)`", row["names"])]


def find(name: str) -> Any:
    """The object of a dotted name, as ``from a.b import c`` would find it; LookupError when it isn't there."""
    package, *rest = name.split(".")
    try:
        found = importlib.import_module(package)
    except ModuleNotFoundError:
        raise LookupError(package) from None
    for depth, part in enumerate(rest, start=1):
        path = ".".join([package, *rest[:depth]])
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError as error:
                # Only the name itself may be missing; a module that is there and can't be imported is a fault.
                if not (error.name and f"{path}.".startswith(f"{error.name}.")):
                    raise
                raise LookupError(path) from None
        found = getattr(found, part)
    return found


def test_the_page_has_rows() -> None:
    assert len(NAMES) > 150
    assert {status for _, status in NAMES} == {"works", "accepted without effect", "refused", "not there"}


def test_no_name_has_two_rows() -> None:
    names = [name for name, _ in NAMES]
    assert sorted(names) == sorted(set(names))


def test_the_status_is_true() -> None:
    wrong = []
    for name, status in NAMES:
        try:
            find(name)
            is_there = True
        except LookupError:
            is_there = False
        if is_there == (status == "not there"):
            wrong.append(f"{name}: {status}")
    assert not wrong, wrong


def test_every_public_name_has_a_row() -> None:
    import npu_device

    listed = {name for name, _ in NAMES}
    missing = [name for name in npu_device.__all__ if f"npu_device.{name}" not in listed]
    assert not missing, f"docs/compatibility.md has no row for {missing}"


def test_every_public_name_has_a_docstring() -> None:
    faces = {name.rpartition(".")[0] for name, status in NAMES if status != "not there"}
    missing = []
    for face in sorted(faces):
        module = find(face)
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            thing = find(f"{face}.{name}")  # imports it if it is a module
            ours = str(getattr(thing, "__module__", None) or getattr(thing, "__name__", "")).startswith("npu_device")
            if ours and callable(thing) and not (thing.__doc__ or "").strip():
                missing.append(f"{face}.{name}")
    assert not missing, missing


def test_the_english_of_pages_follows_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().err
