"""Ascend's operators and Estimator. The star import loads the modules that ``__all__`` names."""

__all__ = ["npu", "npu_aicore_ops", "npu_ops", "npu_unary_ops"]
