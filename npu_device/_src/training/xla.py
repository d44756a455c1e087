"""Keep XLA away from the steps of a model: it can't compile a step that waits for other ranks."""

from __future__ import annotations

import logging
from typing import Any

from npu_device._src.training import device

_log = logging.getLogger("npu_device")


def turn_off(model: Any) -> None:
    """Set a Keras model's ``jit_compile`` to False before its step is traced; rank 0 logs it. Does nothing on a single
    device.
    """
    job = device.unless_child()
    if job is None or not getattr(model, "jit_compile", False):
        return
    model.jit_compile = False
    if job.cluster.rank == 0:
        _log.warning(
            "jit_compile is off for %s %r: XLA can't compile a step that waits for other ranks. Keras 3 turns it on by "
            "itself on a GPU; jit_compile=False in model.compile leaves this message out.",
            type(model).__name__,
            model.name,
        )
