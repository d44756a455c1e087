"""``NPUStrategy``, Ascend's name for TensorFlow's strategy of one device."""

from __future__ import annotations

import tensorflow as tf


class NPUStrategy(tf.compat.v1.distribute.OneDeviceStrategy):
    """``tf.distribute.OneDeviceStrategy`` with a default device. Communication with other ranks is not affected.

    Args:
        device: where variables and computation go.

    Source: Ascend TF Adapter 1.x, ``npu_strategy.NPUStrategy``.
    """

    def __init__(self, device: str = "/cpu:0") -> None:
        super().__init__(device)
