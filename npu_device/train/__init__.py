"""``npu.train``: checkpoints of the whole job, and the loss-scale optimizers of Ascend's TF Adapter 2.x."""

from npu_device._src.training.checkpoint.fit_checkpoint import FitCheckpoint as FitCheckpoint
from npu_device._src.training.checkpoint.folder import CheckpointError as CheckpointError
from npu_device._src.training.checkpoint.job_checkpoint import JobCheckpoint as JobCheckpoint
from npu_device.train import npu_convert as npu_convert, optimizer as optimizer
