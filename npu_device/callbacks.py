"""``npu.callbacks``: callbacks for Keras's ``fit``."""

from npu_device._src.training.checkpoint.fit_checkpoint import FitCheckpoint
from npu_device._src.training.kubeflow_progress import KubeflowProgress

__all__ = ["FitCheckpoint", "KubeflowProgress"]
