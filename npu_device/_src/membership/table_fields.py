"""One JSON object of a rank table and its location in the file, so that each error can name the field.

Which fields a table has is left to ``rank_table``.
"""

from __future__ import annotations

import ipaddress
import json
from typing import Any

from npu_device._src.cluster.errors import ClusterError

_CORRECT = "correct the table (or have the tool that made it write it again); every rank reads the same one."


def fault(path: str, what: str, remedy: str = _CORRECT) -> ClusterError:
    """Return the error for a table that can't be used (Ascend's EI0004)."""
    return ClusterError(f"EI0004: rank table {path}: {what}.\nWhat to do: {remedy}")


def load_object(path: str) -> Fields:
    """Return the table's outermost object.

    Raises:
        ClusterError: the file can't be read, is not JSON, or isn't an object.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
    except OSError as error:
        remedy = "check the path in RANK_TABLE_FILE on this host, and whether this user can read it."
        raise fault(path, f"can't be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise fault(path, "can't be read: it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise fault(path, f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(content, dict):
        raise fault(path, f"holds {_shown(content)}; expected a JSON object")
    return Fields(path, "", content)


class Fields:
    """One object of the table.

    Args:
        path: path of the file.
        where: location of the object in it, such as ``server_list[0].device[1]``; "" for the outermost.
        content: the object.
    """

    def __init__(self, path: str, where: str, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def place(self, name: str) -> str:
        """Return the location of a field of this object: ``server_list[0].device[1].rank_id``."""
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, expected: str) -> ClusterError:
        """Return the error for a field that is missing or has an unexpected value."""
        found = f"is {_shown(self.content[name])}" if name in self.content else "is missing"
        return fault(self.path, f"{self.place(name)} {found}; expected {expected}")

    def text(self, name: str, expected: str, limit: int | None = None) -> str:
        """Return a text that isn't empty. Numbers become text: Ascend wants strings, but many tables have numbers."""
        value = self.content.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip() or (limit is not None and len(value) > limit):
            raise self.wrong(name, expected)
        return value.strip()

    def number(self, name: str, expected: str, low: int = 0, high: int | None = None) -> int:
        """Return a whole number, written as a string or as a number."""
        text = self.text(name, expected)
        if not (text.isascii() and text.isdigit()) or int(text) < low or (high is not None and int(text) > high):
            raise self.wrong(name, expected)
        return int(text)

    def optional_text(self, name: str) -> str | None:
        """Return a text, or None if it is missing or empty."""
        return self.text(name, "text") if self.content.get(name) not in (None, "") else None

    def optional_port(self, name: str) -> int | None:
        """Return a TCP port, or None if it is missing or empty."""
        return (
            self.number(name, "a port from 1 to 65535", 1, 65535) if self.content.get(name) not in (None, "") else None
        )

    def optional_address(self, name: str) -> str | None:
        """Return an IP address, or None if it is missing or empty."""
        text = self.optional_text(name)
        try:
            return None if text is None else str(ipaddress.ip_address(text))
        except ValueError:
            raise self.wrong(name, "an IPv4 or IPv6 address") from None

    def counts(self, name: str, number: int, things: str) -> None:
        """Check an optional field that says how many things the table lists."""
        if name in self.content and self.number(name, f"the number of {things}") != number:
            raise self.wrong(name, f"{number}, the number of {things}")

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects that isn't empty."""
        value = self.content.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list that is not empty")
        found = []
        for index, item in enumerate(value):
            place = f"{self.place(name)}[{index}]"
            if not isinstance(item, dict):
                raise fault(self.path, f"{place} is {_shown(item)}; expected an object")
            found.append(Fields(self.path, place, item))
        return found


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
