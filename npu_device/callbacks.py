"""``npu.callbacks``: callbacks for Keras's ``fit``."""

from npu_device._src.training.checkpoint.fit_checkpoint import FitCheckpoint

__all__ = ["FitCheckpoint"]
