"""``horovod.tensorflow.keras``: for scripts that train with Keras."""

from npu_device.horovod.keras import *  # noqa: F403
from npu_device.horovod.keras import __getattr__ as __getattr__
