"""``npu.distribute.replicate``: Keras's ``fit``, ``evaluate`` and ``predict`` on many ranks, as on one process."""
