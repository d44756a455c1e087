"""Check the name of a group. Imports no TensorFlow, so that a split strategy can be set before anything else."""

from __future__ import annotations

from typing import Any

WORLD_GROUP = "hccl_world_group"
"""The group of all ranks, which always exists."""

_MAX_BYTES = 127


def check_group_name(name: Any) -> None:
    """Check the name that a script gives for a group.

    Raises:
        ValueError: not a text, empty, or longer than 127 bytes in UTF-8.
    """
    expected = f"expected a str of 1 to {_MAX_BYTES} bytes"
    if not isinstance(name, str) or not name:
        raise ValueError(f"group {name!r} is not a group's name; {expected}")
    size = len(name.encode(errors="surrogatepass"))
    if size > _MAX_BYTES:
        raise ValueError(f"group {name!r} is not a group's name: it has {size} bytes; {expected}")
