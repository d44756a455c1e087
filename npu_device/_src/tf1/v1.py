"""``npu.compat.enable_v1``: the switch to TensorFlow 1 behaviour."""

from __future__ import annotations

import tensorflow as tf


def enable_v1() -> None:
    """Make TensorFlow behave as TensorFlow 1 does: graphs and sessions instead of eager mode.

    Before or after ``npu.open()``, and before anything of TensorFlow is used.

    Every rank calls it for itself.

    Source: Ascend TF Adapter 2.x, ``npu.compat.enable_v1``.
    """
    tf.compat.v1.disable_v2_behavior()
