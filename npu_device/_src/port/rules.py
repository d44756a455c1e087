"""The rules of the porting tool, as ``rules.md`` has them: users read that page, and the tool works by it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class PortingRule(NamedTuple):
    """A section of ``rules.md``; one with ``choices`` asks a question, one with ``patterns`` needs no code of its own.

    Attributes:
        action: what is done to the calls that match the patterns.
        patterns: full names of calls, with * for any text.
        example: a diff, "" if there is none.
    """

    name: str
    text: str
    choices: tuple[str, ...]
    action: str
    patterns: tuple[str, ...]
    example: str


def _read_rule(section: str) -> PortingRule:
    """Parse a section: name, text, choices as a list, ``Calls (action): patterns``, and an example."""
    name, _, body = section.partition("\n")
    prose, _, diff = body.partition("```diff\n")
    head, _, calls = prose.partition("\nCalls (")
    text, *choices = [
        " ".join(paragraph.split()) for paragraph in re.split(r"^- ", head, flags=re.M)
    ]
    action = calls.partition(")")[0]
    patterns = tuple(re.findall(r"`(.+?)`", calls))
    return PortingRule(name, text, tuple(choices), action, patterns, diff.partition("```")[0])


def _read_words(section: str) -> dict[str, tuple[str, ...]]:
    """Parse the section of words: a list of topics, each with its words."""
    words = {}
    for line in section.split("\n- ")[1:]:
        topic = line.partition(":")[0]
        words[topic] = tuple(re.findall("`(.+?)`", line))
    return words


PAGE = Path(__file__).with_name("rules.md").read_text(encoding="utf-8")
_WORDS_SECTION, *_RULE_SECTIONS = re.split(r"^### ", PAGE, flags=re.M)[1:]
RULES = {rule.name: rule for rule in map(_read_rule, _RULE_SECTIONS)}
WORDS_BY_TOPIC = _read_words(_WORDS_SECTION)
