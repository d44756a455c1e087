"""Declare the variables by which CUDA and containers choose NVIDIA's GPUs. ``collectives.gpu_choice`` parses them."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import optional

CUDA_VISIBLE_DEVICES = optional(
    "CUDA_VISIBLE_DEVICES",
    forms.TEXT,
    "the GPUs or MIG instances that CUDA shows to a process: numbers, `GPU-…` or `MIG-…` separated by commas; set but "
    "empty or `-1`: none. Each rank takes one of them, by its device number.",
)
NVIDIA_VISIBLE_DEVICES = optional(
    "NVIDIA_VISIBLE_DEVICES",
    forms.TEXT,
    "the GPUs that a container has: `all`, `none`, `void` or a list. A list of MIG instances counts as that of "
    "CUDA_VISIBLE_DEVICES if that is unset; otherwise, the variable only explains why there is no GPU.",
)
