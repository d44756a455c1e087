"""``npu.train.optimizer``: a loss-scale optimizer for whichever Keras the optimizer inside belongs to."""

from npu_device._src.training.optimizers.loss_scale_optimizer import (
    NpuExperimentalLossScaleOptimizer as NpuExperimentalLossScaleOptimizer,
    NpuLossScaleOptimizer as NpuLossScaleOptimizer,
)
