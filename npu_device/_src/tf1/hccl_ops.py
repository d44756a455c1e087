"""The two of Ascend's collective operators that have other signatures in the TensorFlow 1 adapter than in
``npu_device.distribute.hccl_ops``: they take fusion arguments, too.
"""

from __future__ import annotations

from typing import Any

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.reduction import check_fusion_0_or_2
from npu_device._src.training import hccl_ops as _ops


def allgather(tensor: Any, rank_size: int, group: str = WORLD_GROUP, fusion: int = 0, fusion_id: int = -1) -> Any:
    """Gather as ``npu_device.distribute.hccl_ops.allgather`` does; ``fusion`` is 0 or 2, and has no effect."""
    check_fusion_0_or_2("allgather", fusion, fusion_id)
    return _ops.allgather(tensor, rank_size, group)


def reduce_scatter(
    tensor: Any,
    reduction: str,
    rank_size: int,
    group: str = WORLD_GROUP,
    fusion: int = 0,
    fusion_id: int = -1,
) -> Any:
    """Reduce as ``npu_device.distribute.hccl_ops.reduce_scatter`` does; ``fusion`` is 0 or 2, and has no effect."""
    check_fusion_0_or_2("reduce_scatter", fusion, fusion_id)
    return _ops.reduce_scatter(tensor, reduction, rank_size, group)
