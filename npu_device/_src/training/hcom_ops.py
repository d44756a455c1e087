"""Ascend's collective operators by their raw names: ``hccl_ops`` with the parameter names of the generated operators.

For what each does and raises, see ``hccl_ops``. Operators whose parameters have the same names there are left out.

Source: Ascend TF Adapter, ``gen_npu_ops.hcom_*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.training import hccl_ops


def hcom_all_reduce(input: Any, reduction: str, fusion: int = 1, fusion_id: int = -1, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.allreduce``."""
    return hccl_ops.allreduce(input, reduction, fusion, fusion_id, group)


def hcom_all_gather(input: Any, rank_size: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.allgather``."""
    return hccl_ops.allgather(input, rank_size, group)


def hcom_broadcast(
    input: Sequence[Any], root_rank: int, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP
) -> list[Any]:
    """Call ``hccl_ops.broadcast``."""
    return hccl_ops.broadcast(input, root_rank, fusion, fusion_id, group)


def hcom_reduce(
    input: Any, reduction: str, root_rank: int, fusion: int = 0, fusion_id: int = -1, group: str = WORLD_GROUP
) -> Any:
    """Call ``hccl_ops.reduce``."""
    return hccl_ops.reduce(input, reduction, root_rank, fusion, fusion_id, group)


def hcom_reduce_scatter(input: Any, reduction: str, rank_size: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.reduce_scatter``."""
    return hccl_ops.reduce_scatter(input, reduction, rank_size, group)


def hcom_send(input: Any, sr_tag: int, dest_rank: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.send``."""
    return hccl_ops.send(input, sr_tag, dest_rank, group)


def hcom_receive(shape: Any, T: Any, sr_tag: int, src_rank: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.receive``."""
    return hccl_ops.receive(shape, T, sr_tag, src_rank, group)
