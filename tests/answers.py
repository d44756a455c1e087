"""The answers of a pool's rank that has run a body."""

from __future__ import annotations

from typing import Any, NamedTuple


class Answer(NamedTuple):
    """The end of a body on one rank."""

    succeeded: bool
    value: Any  # what the body returned, or its traceback
    warnings: list[str]  # those that are not allowed
    left: list[str]  # what the process holds more than before
