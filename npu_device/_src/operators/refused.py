"""Ascend's operators that can't be provided here: an error says what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from npu_device._src.collectives.group import WORLD_GROUP

_Function = TypeVar("_Function", bound=Callable)


def _refused(because: str) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a function, which only raises, its docstring."""

    def described(function: _Function) -> _Function:
        names = ", ".join(inspect.signature(function).parameters)
        function.__doc__ = (
            f"Raise NotImplementedError: {because}.\n\nArgs:\n    {names}: ignored.\n\n"
            "Raises:\n    NotImplementedError: always.\n"
        )
        return function

    return described


@_refused("TensorFlow has no such operation")
def deformable_conv2d(*arguments: Any, **keywords: Any) -> NoReturn:
    raise NotImplementedError(
        "npu_cube_ops.deformable_conv2d is an operator of the NPU; TensorFlow has none for CPUs and GPUs.\n"
        "What to do: sample the input at the shifted places with tf.gather_nd, four neighbours each, weight them "
        "bilinearly, and give the result to tf.nn.conv2d with the size of the kernel as its stride."
    )


@_refused("the operation gives addresses in other NPUs' memory")
def embeddingrankid(*arguments: Any, **keywords: Any) -> NoReturn:
    raise NotImplementedError(
        "npu_cpu_ops.embeddingrankid gives addresses in the memory of NPUs, which CPUs and GPUs under TensorFlow don't "
        "have.\nWhat to do: the rank that owns a row is index % rank_size (or index // rows_per_rank); exchange the "
        "rows with hccl_ops.all_to_all_v."
    )


@_refused("the operation reads from addresses in the memory of the NPU")
def gather_all_to_all_v(
    addrinfo: Any,
    addrinfo_count_per_rank: Any,
    recv_counts: Any,
    recv_displacements: Any,
    dtype: Any,
    addr_length: Any,
    group: str = WORLD_GROUP,
) -> NoReturn:
    _refuse_addresses(
        "gather_all_to_all_v", "tf.gather the elements, and exchange them with all_to_all_v"
    )


@_refused("the operation reads the memory of another NPU by address")
def remote_read(tensorRemote: Any, data_type: Any) -> NoReturn:
    _refuse_addresses(
        "remote_read", "let the other rank send what is needed: send and receive, or all_to_all_v"
    )


@_refused("the operation reads the memory of another NPU by address")
def remote_ref_read(tensorRemote: Any, cache: Any, offset: Any) -> NoReturn:
    _refuse_addresses(
        "remote_ref_read", "receive what the other rank sends, and assign it to the variable"
    )


@_refused("the operation writes the memory of another NPU by address")
def remote_write(tensorRemote: Any, tensorLocal: Any, data_type: Any) -> NoReturn:
    _refuse_addresses("remote_write", "use send here and receive on the other rank")


@_refused("the operation writes the memory of another NPU by address")
def remote_scatter_write(tensorRemote: Any, tensorLocal: Any, offset: Any) -> NoReturn:
    _refuse_addresses("remote_scatter_write", "use send here and receive on the other rank")


def _refuse_addresses(operation: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"hccl_ops.{operation} works on addresses in the memory of NPUs, which CPUs and GPUs under TensorFlow don't "
        f"have.\nWhat to do: {instead}."
    )


embedding_rank_id = embeddingrankid
hcom_gather_all_to_all_v = gather_all_to_all_v
hcom_remote_read = remote_read
hcom_remote_ref_read = remote_ref_read
hcom_remote_scatter_write = remote_scatter_write
hcom_remote_write = remote_write
