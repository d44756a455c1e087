"""``hccl.split.api``: set where the gradients of a list are cut into segments. Imports no TensorFlow."""

from npu_device._src.gradients.split_strategy import (
    set_by_idx as set_split_strategy_by_idx,
    set_by_size as set_split_strategy_by_size,
)

__all__ = ["set_split_strategy_by_idx", "set_split_strategy_by_size"]
