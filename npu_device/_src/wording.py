"""Phrases of messages: a number with its noun, an amount of memory, and sets of ranks in compact form, which can be
read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_RANKS = 1 << 16  # more than any job has
INDIVISIBLE = "the global batch size must be divisible by the number of ranks"
"""The error of ``shard_and_rebatch_dataset``, by which ``verify`` and ``speed`` know that a script can't run on so many
ranks."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def shortened(texts: Sequence[str], limit: int, tail: str = "more", separator: str = ", ") -> str:
    """Return the first texts of a list, and the number of the others: ``a, b and 3 more``."""
    text = separator.join(texts[:limit])
    if len(texts) > limit:
        text += f" and {len(texts) - limit} {tail}"
    return text


def amount(size: int) -> str:
    """Return a number of bytes in words: ``24 bytes``, ``5.2 KB``, ``1,024.0 MB``."""
    if size < 1e3:
        return counted(size, "byte")
    if size < 1e5:
        return f"{size / 1e3:.1f} KB"
    return f"{size / 1e6:,.1f} MB"


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks in compact form: ``0-3,7``."""
    spans: list[range] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1].stop:
            spans[-1] = range(spans[-1].start, rank + 1)
        else:
            spans.append(range(rank, rank + 1))
    return ",".join(
        str(span.start) if len(span) == 1 else f"{span.start}-{span[-1]}" for span in spans
    )


def ranks_of(text: str) -> list[int]:
    """Return the ranks in a text that ``ranges`` made; ValueError if it didn't."""
    ranks: list[int] = []
    for span in text.split(",") if text else ():
        start, _, end = span.partition("-")
        numbers = range(int(start), int(end or start) + 1)
        ascend = numbers and (not ranks or numbers[0] > ranks[-1])
        if not ascend or numbers[-1] >= MOST_RANKS:
            raise ValueError("ranks that don't ascend, or too many")
        ranks.extend(numbers)
    return ranks
