"""``npu.callbacks``: callbacks for Keras's ``fit``."""

from npu_device._src.training.checkpoint.fit_checkpoint import FitCheckpoint as FitCheckpoint
from npu_device._src.training.checkpoint.kubeflow_progress import (
    KubeflowProgress as KubeflowProgress,
)
