"""One option: the values that may be assigned to it, and its current value. ``table`` lists the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rule:
    """The declaration of an option."""

    name: str
    effect: str  # what it does here, for the documentation page
    default: Any = None  # value if nothing was assigned; None means unset, and then any type may be assigned
    allowed: tuple[Any, ...] = ()  # the values that may be assigned; empty means any
    between: tuple[int, int] | None = None  # smallest and largest number that may be assigned
    bool_words: bool = False  # a bool may be assigned too and becomes the text ``"true"`` or ``"false"``
    deprecated: bool = False  # assigning it logs a warning

    def checked(self, path: str, value: Any) -> Any:
        """Return the value in the form in which it is kept; TypeError or ValueError if it isn't allowed."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None and self.default is None:
            return None
        if self.bool_words and isinstance(value, bool):
            value = "true" if value else "false"
        if self.default is not None and not isinstance(value, type(self.default)):
            raise TypeError(
                f"option {path!r} takes a value of type {type(self.default).__name__} "
                f"(default {self.default!r}); found {value!r} of type {type(value).__name__}"
            )
        # True is accepted where 1 is, as on Ascend; the integer is kept.
        if self.allowed:
            if value not in self.allowed:
                raise self._not_allowed(path, value, f"one of {', '.join(map(repr, self.allowed))}")
            return self.allowed[self.allowed.index(value)]
        if self.between and not self.between[0] <= value <= self.between[1]:
            raise self._not_allowed(path, value, f"{self.between[0]} to {self.between[1]}")
        return int(value) if type(self.default) is int else value

    @staticmethod
    def _not_allowed(path: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"option {path!r} can't be {value!r} (of type {type(value).__name__}); expected {expected}")


@dataclass(frozen=True)
class Section:
    """A named group of options and of further groups."""

    name: str
    members: tuple[Rule | Section, ...]

    def rules(self, prefix: str = "") -> list[tuple[str, Rule]]:
        found: list[tuple[str, Rule]] = []
        for member in self.members:
            path = prefix + member.name
            found += member.rules(path + ".") if isinstance(member, Section) else [(path, member)]
        return found


class Option:
    """The result of reading an option; it follows later assignments."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._value = rule.default

    @property
    def value(self) -> str | None:
        """Return the value as Ascend's adapter does: a text, ``"1"`` or ``"0"`` for booleans, None if unset."""
        if isinstance(self._value, bool):
            return "1" if self._value else "0"
        return None if self._value is None else str(self._value)

    @property
    def typed(self) -> Any:
        """Return the value with the type it was assigned with; None if unset."""
        return self._value

    @property
    def deprecated(self) -> bool:
        """Return True if Ascend advises against the option."""
        return self._rule.deprecated

    def assign(self, path: str, value: Any) -> None:
        """Check a value and keep it. Raises like ``checked`` of ``Rule``."""
        self._value = self._rule.checked(path, value)

    def __repr__(self) -> str:
        return f"<option {self._rule.name}: {self._value!r}>"
