"""The ``fusion`` and ``fusion_id`` arguments of Ascend's all-reduce: which combinations exist."""

from __future__ import annotations

_LARGEST_ID = 0x7FFFFFFF


def check_fusion(fusion: int, fusion_id: int) -> None:
    """Check the pair.

    Args:
        fusion: 0 leaves each tensor alone, 1 fuses by the split strategy, 2 fuses everything with the same id.
        fusion_id: -1 with fusion 1; 0 to 2**31 - 1 with fusion 2; anything with fusion 0.

    Raises:
        ValueError: any other combination.
    """
    if fusion not in (0, 1, 2):
        raise ValueError(
            f"fusion {fusion!r} is unknown; expected 0 (each tensor alone), 1 (by the split strategy) or 2 (all with "
            "one fusion_id)"
        )
    if fusion == 1 and fusion_id != -1:
        raise ValueError(
            f"fusion_id {fusion_id!r} does not go with fusion 1; expected -1, or fusion=2 with an id of 0 to "
            f"{_LARGEST_ID}"
        )
    if fusion == 2 and not 0 <= fusion_id <= _LARGEST_ID:
        raise ValueError(f"fusion_id {fusion_id!r} does not go with fusion 2; expected 0 to {_LARGEST_ID}")


def check_fusion_0_or_2(operation: str, fusion: int, fusion_id: int) -> None:
    """Check the pair for the operations to which no split strategy applies.

    Raises:
        ValueError: fusion is neither 0 nor 2, or the id doesn't go with it.
    """
    if fusion not in (0, 2):
        raise ValueError(f"{operation}: fusion {fusion!r} is unknown; expected 0 (alone) or 2 (all with one fusion_id)")
    check_fusion(fusion, fusion_id)
