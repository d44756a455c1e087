"""Names that aren't imported: a layer, whose class is made at its first use, and those that aren't offered."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from npu_device._src.horovod.modules import PAGE

_SETS = "make a group with hccl.manage.api.create_group, and call npu.distribute.all_reduce(..., group=...)"
_INSTEAD = {
    "global_process_set": "leave process_set out",
    **dict.fromkeys(("ProcessSet", "add_process_set", "remove_process_set"), _SETS),
    "join": "give every rank the same number of steps; npu.distribute.weighted_mean takes ranks without samples",
    "elastic": "npurun --max-restarts with npu.callbacks.FitCheckpoint (npurun docs reliability)",
    "run": "npurun -np N --horovod train.py",
    "broadcast_": "hvd.broadcast_variables",
    "BestModelCheckpoint": "ModelCheckpoint(file, save_best_only=True) of Keras on rank 0, after MetricAverageCallback",
    "PartialDistributedGradientTape": "hvd.DistributedGradientTape, and compute the local gradients with another tape",
    **dict.fromkeys(("start_timeline", "stop_timeline"), "HOROVOD_TIMELINE=FILE, or npurun --trace DIR"),
    **{f"{name}_op": f"hvd.{name}()" for name in ("rank", "local_rank", "size", "local_size")},
    **{f"cross_{name}": f"hvd.{name}() // hvd.local_size(), if hosts are alike" for name in ("rank", "size")},
}


def __getattr__(name: str) -> Any:
    """Return a name that Horovod's modules have besides those that they import."""
    if name == "SyncBatchNormalization":
        return _sync_batch_normalization()
    instead = f"\nWhat to do: {_INSTEAD[name]}." if name in _INSTEAD else ""
    raise AttributeError(f"npu_device's horovod has no {name!r} ({PAGE}).{instead}")


@functools.cache
def _sync_batch_normalization() -> type:
    """Return the layer of ``tf.keras`` that normalises by all ranks, each with the same weight."""
    import tensorflow as tf

    from npu_device._src import compat
    from npu_device._src.training.fit.weighting import moments
    from npu_device._src.training.opening.current_world import world

    kind: Any = tf.keras.layers.BatchNormalization
    name = compat.moments_method(kind)
    own = getattr(kind, name)

    class SyncBatchNormalization(kind):
        """Normalises by mean and variance over the batches of all ranks; takes the arguments of Keras's layer."""

        def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
            if fused:
                raise ValueError("SyncBatchNormalization does not support fused=True.")
            super().__init__(**{**kwargs, "synchronized": True})

    def of_all_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = world()
        if ranks is None:
            return own(self, *args, **kwargs)
        # Every rank counts alike, whatever its number of samples.
        step = SimpleNamespace(weight=1 / ranks.size, counts=1.0, to_exchange=tf.identity, exchanged=tf.identity)
        return moments(step, ranks, self, own, *args, **kwargs)

    setattr(SyncBatchNormalization, name, of_all_ranks)
    return SyncBatchNormalization
