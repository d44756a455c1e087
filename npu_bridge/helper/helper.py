"""The raw operators through a function."""

from __future__ import annotations

from types import ModuleType

from npu_device import gen_npu_ops


def get_gen_ops() -> ModuleType:
    """Return ``npu_device.gen_npu_ops``."""
    return gen_npu_ops
