"""npurun docs: the pages that messages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_device.launch import docs

ROOT = Path(__file__).resolve().parent.parent


def test_without_a_name_all_pages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([]) == 0
    assert re.search(r"^recipes +Recipes$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("name", ["faster", "faster.md", "docs/faster.md"])
def test_a_page_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([name]) == 0
    assert capsys.readouterr().out.startswith("# Make it faster\n")


def test_an_unknown_name_names_those_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["recipe"]) == 2
    assert capsys.readouterr().err == "npurun docs: there is no page 'recipe'. What to do: name one of recipes\n"


def test_pages_that_messages_name_exist() -> None:
    files = [path for path in (ROOT / "npu_device").rglob("*.py") if path.name != "docs.py"]
    named = {name for path in files for name in re.findall(r"npurun docs ([a-z_]+)", path.read_text())}
    assert {"reliability", "security"} <= named <= set(docs._pages())
