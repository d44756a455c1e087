"""An environment variable as a constant: its name, form, default, unit and meaning.

Only this module reads the environment. The other files declare the variables, one file for each owner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, Generic, TypeVar

Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True)
class Form(Generic[Value_co]):
    """The form of a value: ``parse`` makes the value or raises ValueError; ``expected`` is for readers."""

    parse: Callable[[str], Value_co]
    expected: str


@dataclass(frozen=True)
class Variable(Generic[Value_co]):
    name: str
    form: Form[Value_co]  # how its value is written
    default: Value_co  # the value of ``get`` if the variable is unset or empty
    meaning: str  # one sentence for the documentation
    unit: str = ""  # unit of the value, or ""
    everywhere: bool = False  # the ranks refuse to begin with different values

    def raw(self) -> str | None:
        """Return the text in the environment; None if unset or empty."""
        return os.environ.get(self.name) or None

    def text(self) -> str | None:
        """Return the text in the environment, also if it is empty; None if the variable is unset."""
        return os.environ.get(self.name)

    def set(self, text: str) -> None:
        os.environ[self.name] = text

    def is_set(self) -> bool:
        return self.raw() is not None

    def get(self) -> Value_co:
        """Return the value, or the default if the variable is unset or empty; ValueError (EI0001) if malformed."""
        text = self.raw()
        if text is None:
            return self.default
        try:
            return self.form.parse(text.strip())
        except ValueError:
            raise ValueError(
                f"EI0001: the environment variable {self.name} is {text!r}; expected {self.form.expected}.\n"
                f"What to do: correct or unset {self.name}. It means: {self.meaning}"
            ) from None

    def pass_on(self) -> None:
        """Give the default to TensorFlow, which reads the variable itself, unless the user has set it."""
        if not self.is_set():
            self.set(str(self.default))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the variable from this process, including TensorFlow, while the block runs."""
        text = os.environ.pop(self.name, None)
        try:
            yield
        finally:
            if text is not None:
                os.environ[self.name] = text


def names_in_environment(prefix: str) -> set[str]:
    """Return the names of the variables in the environment that begin with a prefix, and aren't empty."""
    return {name for name, text in os.environ.items() if name.startswith(prefix) and text}


def optional(
    name: str, form: Form[Value], meaning: str, unit: str = "", everywhere: bool = False
) -> Variable[Value | None]:
    return Variable(name, form, None, meaning, unit, everywhere)
