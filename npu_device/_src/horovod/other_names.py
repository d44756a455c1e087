"""Names that are imported at their first use, and those that aren't offered."""

from __future__ import annotations

from typing import Any

from npu_device._src.horovod.modules import OTHER_NAMES, PAGE


def __getattr__(name: str) -> Any:
    """Return a name that Horovod's modules have besides those that they import."""
    if name == "SyncBatchNormalization":
        from npu_device._src.training.distribute.sync_batch_normalization import (
            SyncBatchNormalization,
        )

        return SyncBatchNormalization
    if name == "run":
        from npu_device._src.horovod.function_run import run

        return run
    instead = ""
    if name in OTHER_NAMES:
        instead = f"\nWhat to do: {OTHER_NAMES[name]}."
    raise AttributeError(f"npu_device's horovod has no {name!r} ({PAGE}).{instead}")
