"""Environment variables as constants: name, form, default, unit and meaning. Forms: numbers, addresses, ranges, words.

The other files declare the variables, one file for each owner.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Callable, Generic, TypeVar

Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True)
class Form(Generic[Value_co]):
    """The form of a value: ``parse`` makes the value or raises ValueError; ``expected`` is for readers."""

    parse: Callable[[str], Value_co]
    expected: str


@dataclass(eq=False)
class Variable(Generic[Value_co]):
    form: Form[Value_co]  # how its value is written
    default: Value_co  # the value of ``get`` if the variable is unset or empty
    meaning: str  # one sentence for the documentation
    unit: str = ""  # unit of the value, or ""
    is_compared: bool = False  # the ranks refuse to begin with different values
    name: str = field(init=False)  # name of the constant that holds it; ``checks`` sets it

    def raw(self) -> str | None:
        """Return the text in the environment; None if unset or empty."""
        # Job scripts often set a variable to nothing in order to unset it.
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
            # Shells and files leave spaces around a value.
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
    form: Form[Value], meaning: str, unit: str = "", is_compared: bool = False
) -> Variable[Value | None]:
    return Variable(form, None, meaning, unit, is_compared)


def integer(low: int, high: int | None = None) -> Form[int]:
    def parse(text: str) -> int:
        # ``int`` would also take "1_000" and digits of other scripts.
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(text)
        number = int(text)
        if number < low or (high is not None and number > high):
            raise ValueError(text)
        return number

    if high is None:
        return Form(parse, f"a whole number of at least {low}")
    return Form(parse, f"a whole number from {low} to {high}")


def one_of(*texts: str, spelled: Callable[[str], str] = str, note: str = "") -> Form[str]:
    """Return the form of a word, which ``spelled`` may give the spelling of the list."""

    def parse(text: str) -> str:
        word = spelled(text)
        if word not in texts:
            raise ValueError(text)
        return word

    return Form(parse, f"one of {', '.join(texts)}{note}")


def split(text: str) -> str | tuple[int, ...] | tuple[float, ...]:
    """Parse numbers as ``set_split_strategy_by_idx`` takes them, percentages (floats), or ``auto``, which is gone."""
    # Accepted, though it has no effect: the split strategy then warns, with the remedy.
    if text == "auto":
        return text
    words = text.strip("[]").split(",")
    if text.endswith("%"):
        shares = tuple(float(word.strip().removesuffix("%")) for word in words)
        # The sum has to be exact, as in ``set_split_strategy_by_size``.
        if len(shares) > 8 or min(shares) < 0 or sum(shares) != 100:
            raise ValueError(text)
        return shares
    numbers = tuple(map(int, words))
    is_rising = list(numbers) == sorted(set(numbers))
    if len(numbers) > 8 or numbers[0] < 0 or not is_rising:
        raise ValueError(text)
    return numbers


def _span(text: str, high: float) -> tuple[int, int]:
    start, _, end = text.partition("-")
    if not (start.isdecimal() and end.isdecimal()):
        raise ValueError(text)
    span = int(start), int(end)
    if not 1 <= span[0] <= span[1] <= high:
        raise ValueError(text)
    return span


def _windows(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(_span(span, float("inf")) for span in text.split(","))


def most_nodes(text: str) -> int:
    """Parse ``4``, or ``2:4`` for the fewest and the most nodes; return the most."""
    match = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text)
    if match is None or not 1 <= int(match[1] or 1) <= int(match[2]):
        raise ValueError(text)
    return int(match[2])


def address_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    # An IPv6 address stands in brackets, as in [::1]:2222.
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        # An IPv6 address without brackets is refused, since its last group may be the port.
        host = ""
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(text)
    return host, int(port)


def audit(text: str) -> int | str:
    """Parse ``auto``, ``off`` or a number of steps; 0 is ``off``."""
    if text in ("auto", "off"):
        return text
    if not text.isdecimal():
        raise ValueError(text)
    return int(text) or "off"


def seconds(high: float) -> Form[float]:
    def parse(text: str) -> float:
        number = float(text)
        # NaN fails this comparison, too.
        if not 0 < number <= high:
            raise ValueError(text)
        return number

    return Form(parse, f"a number above 0, at most {high:g}")


def _numbers(text: str) -> tuple[tuple[str, float], ...]:
    pairs = []
    for pair in text.split(","):
        name, _, number = pair.partition("=")
        pairs.append((name.strip(), float(number)))
    return tuple(pairs)


INDEX = integer(0)
COUNT = integer(1)
PORT = integer(1, 65535)
PORTS = Form(lambda text: _span(text, 65535), "first and last port, such as 61000-61031")
NUMBERS = Form(_numbers, "names with numbers, such as SHORT_SECONDS=1,READER_SECONDS=0.5")
WINDOWS = Form(_windows, "first and last iteration, such as 1-25 or 100-120,500-520")
ADDRESS = Form(lambda text: str(ipaddress.ip_address(text)), "an IPv4 or IPv6 address")
PATH = Form(str, "a path")
TEXT = Form(str, "text")
COMMAND = Form(lambda text: shlex.join(shlex.split(text)), "a command line")
