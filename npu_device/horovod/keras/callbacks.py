"""``horovod.keras.callbacks``."""

from npu_device._src.horovod.keras_names import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from npu_device._src.horovod.other_names import (
    __getattr__,
)

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "__getattr__",
]
