"""``from npu_bridge.hccl import hccl_ops``."""
