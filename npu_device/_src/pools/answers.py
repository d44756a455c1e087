"""The answer of a rank that has called a function, and the error that comes of it. Imports no TensorFlow."""

from __future__ import annotations

from typing import Any, NamedTuple


class Answer(NamedTuple):
    """The end of a call on one rank."""

    succeeded: bool
    value: Any  # what the function returned, or its traceback
    goes_on: bool = True  # the rank can be called again
    error: bytes = b""  # pickled, if the function raised one that can be sent


class RankError(AssertionError):
    """A function that was called on real ranks has failed on some of them.

    Attributes:
        errors: text of the error of each rank, by rank; the first to fail comes first.
    """

    def __init__(self, text: str, errors: dict[int, str]) -> None:
        super().__init__(text)
        self.errors = errors
