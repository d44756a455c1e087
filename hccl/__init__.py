"""Import-compatible with Ascend's ``hccl`` package; everything lives in ``npu_device``."""
