"""``npu.train``: the loss-scale optimizers of Ascend's TF Adapter 2.x."""

from npu_device.train import npu_convert, optimizer

__all__ = ["npu_convert", "optimizer"]
