"""``horovod.tensorflow.keras.callbacks``."""

from npu_device._src.horovod.keras_callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from npu_device._src.horovod.not_offered import (
    __getattr__,
)

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "__getattr__",
]
