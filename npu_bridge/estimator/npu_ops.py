"""``from npu_bridge.estimator import npu_ops``: dropout, LARS, and the start and the end of the system."""

from npu_device import gen_npu_ops
from npu_device._src.operators.activations import dropout
from npu_device._src.operators.adam_lamb import lars as LARS, lars_v2 as LARSV2
from npu_device._src.tf1.system import initialize_system, shutdown_system

__all__ = ["LARS", "LARSV2", "dropout", "gen_npu_ops", "initialize_system", "shutdown_system"]
