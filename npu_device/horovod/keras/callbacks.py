"""``horovod.keras.callbacks``."""

from npu_device._src.horovod.keras_names import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
    MetricAverageCallback as MetricAverageCallback,
)
from npu_device._src.horovod.other_names import __getattr__ as __getattr__
