"""The mark of a wrapped optimizer: its reducer, as an attribute of the object."""

from __future__ import annotations

from typing import Any

from npu_device._src import compat

REDUCER = "_npu_gradient_reducer"
"""The attribute of a wrapped optimizer that holds its ``GradientReducer``."""


def reducer_of(optimizer: Any) -> Any:
    """Return the ``GradientReducer`` of a wrapped optimizer; None for an unwrapped one."""
    # Read from the dictionary: a wrapper may pass on the attributes of what is inside to ``getattr``.
    return getattr(optimizer, "__dict__", {}).get(REDUCER)


def is_wrapped(optimizer: Any) -> bool:
    """Return True when the optimizer, or the one inside a loss-scale optimizer, already reduces its gradients."""
    return any(reducer_of(candidate) is not None for candidate in compat.with_inner(optimizer))


def reducer_inside(optimizer: Any) -> Any:
    """Return the reducer of the optimizer inside a loss-scale optimizer of Keras 3 that isn't wrapped itself; else
    None.

    It calls the one inside only if the gradients are finite, on which all ranks must agree, or some wait forever. Keras
    makes it itself (compile under mixed_float16) without telling the inner one. So its gradients are reduced before it
    looks at them.
    """
    if reducer_of(optimizer) is not None:
        return None
    return reducer_of(getattr(optimizer, "inner_optimizer", None))


def reducing_optimizer(optimizer: Any) -> Any:
    """Return the optimizer whose methods reduce: the one inside a loss-scale optimizer if that one has been wrapped, or
    adds up gradients over several steps; else the optimizer itself.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if reducer_of(inner) is not None or compat.accumulation_steps(inner) > 1:
        return inner
    return optimizer
