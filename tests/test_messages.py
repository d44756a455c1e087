"""docs/messages.md lists every message with a remedy, below its family, as the code has it."""

from __future__ import annotations

import ast
import re

import messages

PAGE = messages.PAGE.read_text()
DIFFERS = (messages.ROOT / "docs" / "differs.md").read_text()


def quoted() -> list[str]:
    """Return what the hand-written parts of the page, ``differs.md`` and the tutorials quote of messages."""
    prose = re.sub(r"```text\n.*?```", "", PAGE, flags=re.DOTALL) + DIFFERS
    found = [text for text in re.findall(r'"([^"]+)"', prose) if text.count(" ") > 1]
    for page in (messages.ROOT / "docs" / "tutorials").glob("*.md"):
        found += [block.splitlines()[0] for block in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)]
    return found


def test_the_page_has_every_message() -> None:
    assert messages.written(PAGE) == PAGE, "run: make docs"


def test_the_page_is_found_by_words_of_messages() -> None:
    assert "\nthe ranks were given different data\n" in PAGE
    assert sum(map(len, messages.openings().values())) > 150


def plain(text: str) -> str:
    """Return a text without values."""
    return re.sub(r"…|\b\d+\b|\bAdam\b|^\w*Error: ", "", " ".join(text.split()))


def test_what_is_quoted_is_in_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in messages.SOURCE.rglob("*.py")]
    code = "\n".join(plain(text) for tree in trees for text in messages.texts(tree))
    assert len(quoted()) > 10
    assert not [text for text in quoted() if plain(text) not in code]
