"""An Estimator from a Keras model."""

from npu_device._src.tf1.run_config import model_to_npu_estimator

__all__ = ["model_to_npu_estimator"]
