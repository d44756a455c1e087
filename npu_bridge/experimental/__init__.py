"""``from npu_bridge.experimental import hccl``."""
