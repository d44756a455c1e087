"""Ascend's collective operators by their raw names: ``hccl_ops`` with the parameter names of the generated operators.

For what each does and raises, see ``hccl_ops``. Operators whose parameters have the same names there are left out.

Source: Ascend TF Adapter, ``gen_npu_ops.hcom_*``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.training import hccl_ops

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _described(function: _Function) -> _Function:
    """Give a function its docstring, which names the one in ``hccl_ops``."""
    called = f"``hccl_ops.{function.__name__.removeprefix('hcom_').replace('all_', 'all')}``"
    names = ", ".join(inspect.signature(function).parameters)
    function.__doc__ = (
        f"Call {called}.\n\nArgs:\n    {names}: in the order of its arguments.\n\nReturns:\n    Its result.\n\n"
        "Raises:\n    ValueError: an argument that it refuses.\n    RuntimeError: another rank has failed or left.\n"
    )
    return function


@_described
def hcom_all_reduce(input: Any, reduction: str, fusion: int = 1, fusion_id: int = -1, group: str = WORLD_GROUP) -> Any:
    return hccl_ops.allreduce(input, reduction, fusion, fusion_id, group)


@_described
def hcom_all_gather(input: Any, rank_size: int, group: str = WORLD_GROUP) -> Any:
    return hccl_ops.allgather(input, rank_size, group)


@_described
def hcom_broadcast(
    input: Sequence[Any], root_rank: int, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP
) -> list[Any]:
    return hccl_ops.broadcast(input, root_rank, fusion, fusion_id, group)


@_described
def hcom_reduce(
    input: Any, reduction: str, root_rank: int, fusion: int = 0, fusion_id: int = -1, group: str = WORLD_GROUP
) -> Any:
    return hccl_ops.reduce(input, reduction, root_rank, fusion, fusion_id, group)


@_described
def hcom_reduce_scatter(input: Any, reduction: str, rank_size: int, group: str = WORLD_GROUP) -> Any:
    return hccl_ops.reduce_scatter(input, reduction, rank_size, group)


@_described
def hcom_send(input: Any, sr_tag: int, dest_rank: int, group: str = WORLD_GROUP) -> Any:
    return hccl_ops.send(input, sr_tag, dest_rank, group)


@_described
def hcom_receive(shape: Any, T: Any, sr_tag: int, src_rank: int, group: str = WORLD_GROUP) -> Any:
    return hccl_ops.receive(shape, T, sr_tag, src_rank, group)


hcom_all_to_all_v = hccl_ops.all_to_all_v
hcom_all_to_all_vc = hccl_ops.all_to_all_v_c
