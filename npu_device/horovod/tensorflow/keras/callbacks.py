"""``horovod.tensorflow.keras.callbacks``."""

from npu_device.horovod.keras.callbacks import *  # noqa: F403
from npu_device.horovod.keras.callbacks import __getattr__ as __getattr__
