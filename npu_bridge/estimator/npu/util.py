"""Iterations per loop, the number of ranks, and settings of a script for the NPU compiler."""

from npu_device._src.membership.schemes import world_size_from_environment as get_ranksize
from npu_device._src.tf1.hooks import IterationPerLoop, set_iteration_per_loop
from npu_device._src.tf1.system import (
    check_aoe_mode,
    keep_tensors_dtypes,
    npu_compile,
    set_graph_exec_config,
)

__all__ = [
    "IterationPerLoop",
    "check_aoe_mode",
    "get_ranksize",
    "keep_tensors_dtypes",
    "npu_compile",
    "set_graph_exec_config",
    "set_iteration_per_loop",
]
