"""The examples in docstrings do what they show, on a single device."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import npu_device
from npu_device._src.gradients import split_strategy

PACKAGE = Path(npu_device.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)
assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    finally:
        split_strategy._strategies.clear()
    assert tried
    assert not failed, "see the output for what came instead"
