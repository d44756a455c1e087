"""Keras callbacks of the package. The callback's module itself is imported only when it is used, since it imports
Keras.
"""

from npu_device.callbacks.append import npu_callbacks_append

__all__ = ["npu_callbacks_append"]
