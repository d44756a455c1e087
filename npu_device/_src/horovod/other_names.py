"""Names that are imported at their first use, and those that aren't offered."""

from __future__ import annotations

from typing import Any

from npu_device._src.horovod.modules import PAGE

_SETS = "make a group with hccl.manage.api.create_group, and call npu.distribute.all_reduce(..., group=...)"
_TIMELINE = "HOROVOD_TIMELINE=FILE, or npurun --trace DIR"
_INSTEAD = {
    "global_process_set": "leave process_set out",
    "ProcessSet": _SETS,
    "add_process_set": _SETS,
    "remove_process_set": _SETS,
    "join": "give every rank the same number of steps; npu.distribute.weighted_mean takes ranks without samples",
    "elastic": "npurun --max-restarts with npu.train.FitCheckpoint (npurun docs reliability)",
    "BestModelCheckpoint": "ModelCheckpoint(file, save_best_only=True) of Keras on rank 0, after MetricAverageCallback",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "cross_rank": "hvd.rank() // hvd.local_size(), if hosts are alike",
    "cross_size": "hvd.size() // hvd.local_size(), if hosts are alike",
}


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
    if name in _INSTEAD:
        instead = f"\nWhat to do: {_INSTEAD[name]}."
    raise AttributeError(f"npu_device's horovod has no {name!r} ({PAGE}).{instead}")
