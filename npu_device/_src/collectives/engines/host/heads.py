"""The heads that members send with an operation's first data, to compare their calls before they read each other's
data."""

from __future__ import annotations

from collections.abc import Sequence

from npu_device._src.collectives.call import Terms

Head = Sequence[int]
"""A member's description of a call, in 32-bit words. It must be the same on all members."""

HEAD_WORDS = 4
"""Number of words of a head."""

_AGREED, _COMPARES, _OVERLAPS = range(3)  # the last word


class Mismatch(Exception):
    """The members' heads of a call differ. All members detect it in the same step, before any data is read."""


def head_of(terms: Terms | None, shapes: int) -> Head:
    """Return the head of a call; without terms, the ranks have agreed on it before."""
    if terms is None:
        return (_AGREED,) * HEAD_WORDS
    return (*terms.head, shapes, _OVERLAPS if terms.overlaps else _COMPARES)


def compares(head: Head) -> bool:
    """Return whether the members have not agreed on the call before."""
    return head[-1] != _AGREED


def require_same(heads: Sequence[Head]) -> None:
    """Compare all members' heads.

    Raises:
        Mismatch: they differ, or a member is in two calls at once, which all members refuse.
    """
    first, *others = heads
    if any(head != first for head in others) or first[-1] == _OVERLAPS:
        raise Mismatch
