"""``npu.distribute.SyncBatchNormalization``, a layer of ``tf.keras``. Importing this file imports Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.training.distribute.normalization import moments_of_all_ranks

_Base: Any = tf.keras.layers.BatchNormalization


@tf.keras.utils.register_keras_serializable("npu_device")
class SyncBatchNormalization(_Base):
    """Keras's ``BatchNormalization`` with mean and variance of the samples of all ranks.

    Args:
        *args: as for ``keras.layers.BatchNormalization`` of ``tf.keras``.
        fused: None or False.
        **kwargs: as for ``keras.layers.BatchNormalization``; ``synchronized`` is True.

    Raises:
        ValueError: ``fused=True``, or ``synchronized=False``.
        RuntimeError: when the layer trains: another rank has failed or left, or calls the layer less often; the
            environment names several ranks but the job can't be joined any more.

    Masked steps don't count, and a rank may have more samples than others, or none. A call that trains takes two small
    transfers, and two more in the backward pass; every rank has to make it. Inference takes none. On a single device it
    is Keras's layer. To load a saved model, name this class before, or pass it in ``custom_objects``.

    >>> import npu_device as npu
    >>> npu.distribute.SyncBatchNormalization(momentum=0.9).synchronized
    True
    """

    def __init__(
        self, *args: Any, fused: bool | None = None, synchronized: bool = True, **kwargs: Any
    ) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if not synchronized:
            raise ValueError(
                "SyncBatchNormalization was given synchronized=False.\nWhat to do: use keras.layers.BatchNormalization."
            )
        super().__init__(*args, synchronized=True, **kwargs)


@compat.do_not_convert
def _of_all_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
    own = getattr(super(SyncBatchNormalization, self), compat.moments_method(self))
    return moments_of_all_ranks(self, WORLD_GROUP, own, *args, **kwargs)


# The name of the method differs between releases of Keras.
setattr(SyncBatchNormalization, compat.moments_method(_Base), _of_all_ranks)
