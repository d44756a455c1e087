"""An Estimator from a Keras model."""

from npu_device._src.tf1.run_config import model_to_npu_estimator as model_to_npu_estimator
