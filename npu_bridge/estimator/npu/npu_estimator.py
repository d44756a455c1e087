"""Ascend's Estimator. Scripts take ``NPURunConfig`` from here by the star import."""

from npu_device._src.tf1.run_config import (
    NPUEstimator as NPUEstimator,
    NPUEstimatorSpec as NPUEstimatorSpec,
    NPURunConfig as NPURunConfig,
)
