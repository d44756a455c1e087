"""``from npu_bridge.helper import helper``."""
