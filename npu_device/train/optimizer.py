"""``npu.train.optimizer``: a loss-scale optimizer for whichever Keras the optimizer inside belongs to."""

from npu_device._src.training.loss_scale_optimizer import (
    NpuExperimentalLossScaleOptimizer as NpuExperimentalLossScaleOptimizer,
    NpuLossScaleOptimizer as NpuLossScaleOptimizer,
)
