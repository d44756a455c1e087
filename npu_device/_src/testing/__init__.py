"""``npu_device.testing``: real ranks in tests, pytest's plugin for them, faults, comparisons, and the soak."""
