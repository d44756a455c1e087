"""An Estimator made of a Keras model."""

from npu_device.sessions.estimator import model_to_npu_estimator

__all__ = ["model_to_npu_estimator"]
