"""Split a stream into lines and progress-bar refreshes. It works on bytes, so that nothing is undecodable."""

from __future__ import annotations

import re
from typing import NamedTuple

_END = re.compile(rb"(\r\n|\n|\r)")


class Piece(NamedTuple):
    """One line (``end`` is a newline, or empty at the end of the stream) or one refresh of it (``end`` is ``\\r``)."""

    text: bytes
    end: bytes

    @property
    def is_refresh(self) -> bool:
        """Return True if the next piece overwrites this one on a terminal."""
        return self.end == b"\r"


class Splitter:
    """Takes bytes as they come, and returns the complete pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Piece]:
        """Return the pieces that ``data`` completes."""
        if b"\n" not in data and b"\r" not in data:  # a long line: don't search all of it again for each block
            self._rest += data
            return []
        parts = _END.split(bytes(self._rest) + data)
        self._rest = bytearray(parts[-1])
        return [Piece(text, end) for text, end in zip(parts[0::2], parts[1::2])]

    def finish(self) -> list[Piece]:
        """Return the last line, if it has no newline."""
        return [Piece(bytes(self._rest), b"")] if self._rest else []
