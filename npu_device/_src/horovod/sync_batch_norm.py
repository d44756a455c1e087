"""``hvd.SyncBatchNormalization``: batch normalisation by the samples of all ranks, each rank with the same weight."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.batch_norm import moments
from npu_device._src.training.world import world


@functools.cache
def layer_class() -> type:
    """Return the class of the layer, of ``tf.keras``."""
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
