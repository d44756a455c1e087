"""``npu.train``: checkpoints of the whole job, and the loss-scale optimizers of Ascend's TF Adapter 2.x."""

from npu_device._src.training.checkpoint.fit_checkpoint import FitCheckpoint
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.checkpoint.job_checkpoint import JobCheckpoint
from npu_device.train import npu_convert, optimizer

__all__ = ["CheckpointError", "FitCheckpoint", "JobCheckpoint", "npu_convert", "optimizer"]
