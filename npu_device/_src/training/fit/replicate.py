"""``npu.distribute.replicate``: the one line for Keras."""

from __future__ import annotations

from typing import Any

from npu_device._src.training.fit.replica import Replica, replica_of
from npu_device._src.training.world import world


def replicate(model: Any) -> Any:
    """Make a Keras model's ``fit``, ``evaluate`` and ``predict`` do on all ranks together what one process does.

    Args:
        model: a Keras model, of Keras 3 or tf-keras, compiled or not yet.

    Returns:
        The same object; on a single device untouched.

    Raises:
        TypeError: not a Keras model.
        RuntimeError: the environment names several ranks, but the job can't be joined any more.
    """
    if not all(hasattr(model, name) for name in ("fit", "train_step", "make_train_function")):
        raise TypeError(f"expected a Keras model; found a {type(model).__module__}.{type(model).__name__}")
    ranks = world()
    if ranks is not None and replica_of(model) is None:
        Replica(ranks, model)
    return model
