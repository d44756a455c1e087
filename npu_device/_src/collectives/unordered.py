"""Refuse collectives where TensorFlow runs several at once: the ranks' calls would get each other's data."""

from __future__ import annotations

from npu_device._src import compat


def require_order(what: str) -> None:
    """Raise RuntimeError if the graph being built runs several times at once.

    Args:
        what: the call, for the message.
    """
    place = compat.place_without_order()
    if place is not None:
        raise RuntimeError(
            f"{what} in {place}, where calls run in another order on each rank and would get each other's data.\n"
            "What to do: call it outside, before or after, on the whole batch instead of each element; give "
            "tape.jacobian the argument experimental_use_pfor=False."
        )
