"""The forms that values of environment variables have: numbers, addresses, ranges."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from typing import Callable

from npu_device._src.environment.variable import Form


def integer(low: int, high: int | None = None) -> Form[int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(text)
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return Form(parse, f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}")


def one_of(*texts: str) -> Form[str]:
    def parse(text: str) -> str:
        if text not in texts:
            raise ValueError(text)
        return text

    return Form(parse, f"one of {', '.join(texts)}")


def split(text: str) -> str | tuple[int, ...] | tuple[float, ...]:
    """Parse numbers as ``set_split_strategy_by_idx`` takes them, percentages (floats), or ``auto``, which is gone."""
    parts = text.strip("[]").split(",")
    if text == "auto":
        return text
    if text.endswith("%"):
        shares = tuple(float(part.strip().removesuffix("%")) for part in parts)
        if len(shares) > 8 or min(shares) < 0 or sum(shares) != 100:
            raise ValueError(text)
        return shares
    numbers = tuple(int(part) for part in parts)
    if len(numbers) > 8 or numbers[0] < 0 or list(numbers) != sorted(set(numbers)):
        raise ValueError(text)
    return numbers


def _span(text: str, most: float) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= most):
        raise ValueError(text)
    return int(first), int(last)


def windows(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(_span(part, float("inf")) for part in text.split(","))


def most_nodes(text: str) -> int:
    """Parse ``4``, or ``2:4`` for the fewest and the most nodes; return the most."""
    fewest, colon, most = text.partition(":")
    numbers = [fewest, most] if colon else [fewest]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers) or int(numbers[0]) > int(numbers[-1]):
        raise ValueError(text)
    return int(numbers[-1])


def address_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: where the port begins is ambiguous
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(text)
    return host, int(port)


def ports(text: str) -> tuple[int, int]:
    return _span(text, 65535)


def audit(text: str) -> int | str:
    """Parse ``auto``, ``off`` or a number of steps; 0 is ``off``."""
    if text in ("auto", "off"):
        return text
    if not text.isdecimal():
        raise ValueError(text)
    return int(text) or "off"


def command(text: str) -> str:
    shlex.split(text)
    return text


def log_level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError(text)
    return text.upper()


def signal_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return the parser of the name of a signal, which may lack ``SIG``."""

    def parse(text: str) -> str:
        name = "SIG" + text.upper().removeprefix("SIG")
        if name not in names:
            raise ValueError(text)
        return name

    return parse


def seconds(high: float) -> Form[float]:
    def parse(text: str) -> float:
        value = float(text)
        if not 0 < value <= high:  # also refuses nan
            raise ValueError(text)
        return value

    return Form(parse, f"a number above 0, at most {high:g}")


INDEX = integer(0)
COUNT = integer(1)
PORT = integer(1, 65535)
ADDRESS = Form(lambda text: str(ipaddress.ip_address(text)), "an IPv4 or IPv6 address")
PATH = Form(str, "a path")
TEXT = Form(str, "text")
COMMAND = Form(command, "a command line")
