"""Ascend's Estimator. Scripts take ``NPURunConfig`` from here by the star import."""

from npu_device.sessions.estimator import NPUEstimator, NPUEstimatorSpec
from npu_device.sessions.run_config import NPURunConfig

__all__ = ["NPUEstimator", "NPUEstimatorSpec", "NPURunConfig"]
