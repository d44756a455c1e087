"""Ascend's import paths of the TensorFlow 1 adapter. The star import loads the modules that ``__all__`` names."""

__all__ = ["estimator", "hccl", "npu_init"]
