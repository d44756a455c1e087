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
    """Call ``hccl_ops.allreduce``.

    Args:
        input, reduction, fusion, fusion_id, group: as in ``hccl_ops.allreduce``.

    Returns:
        What ``hccl_ops.allreduce`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.allreduce`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.allreduce(input, reduction, fusion, fusion_id, group)


def hcom_all_gather(input: Any, rank_size: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.allgather``.

    Args:
        input, rank_size, group: as in ``hccl_ops.allgather``.

    Returns:
        What ``hccl_ops.allgather`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.allgather`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.allgather(input, rank_size, group)


def hcom_broadcast(
    input: Sequence[Any], root_rank: int, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP
) -> list[Any]:
    """Call ``hccl_ops.broadcast``.

    Args:
        input, root_rank, fusion, fusion_id, group: as in ``hccl_ops.broadcast``.

    Returns:
        What ``hccl_ops.broadcast`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.broadcast`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.broadcast(input, root_rank, fusion, fusion_id, group)


def hcom_reduce(
    input: Any, reduction: str, root_rank: int, fusion: int = 0, fusion_id: int = -1, group: str = WORLD_GROUP
) -> Any:
    """Call ``hccl_ops.reduce``.

    Args:
        input, reduction, root_rank, fusion, fusion_id, group: as in ``hccl_ops.reduce``.

    Returns:
        What ``hccl_ops.reduce`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.reduce`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.reduce(input, reduction, root_rank, fusion, fusion_id, group)


def hcom_reduce_scatter(input: Any, reduction: str, rank_size: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.reduce_scatter``.

    Args:
        input, reduction, rank_size, group: as in ``hccl_ops.reduce_scatter``.

    Returns:
        What ``hccl_ops.reduce_scatter`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.reduce_scatter`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.reduce_scatter(input, reduction, rank_size, group)


def hcom_send(input: Any, sr_tag: int, dest_rank: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.send``.

    Args:
        input, sr_tag, dest_rank, group: as in ``hccl_ops.send``.

    Returns:
        What ``hccl_ops.send`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.send`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.send(input, sr_tag, dest_rank, group)


def hcom_receive(shape: Any, T: Any, sr_tag: int, src_rank: int, group: str = WORLD_GROUP) -> Any:
    """Call ``hccl_ops.receive``.

    Args:
        shape, T, sr_tag, src_rank, group: as in ``hccl_ops.receive``.

    Returns:
        What ``hccl_ops.receive`` returns.

    Raises:
        ValueError: an argument that ``hccl_ops.receive`` refuses.
        RuntimeError: another rank has failed or left.
    """
    return hccl_ops.receive(shape, T, sr_tag, src_rank, group)
