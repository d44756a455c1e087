"""Ascend's operators on addresses in the memory of NPUs: the names exist, and their errors say what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from npu_device._src.collectives.group import WORLD_GROUP


def gather_all_to_all_v(
    addrinfo: Any,
    addrinfo_count_per_rank: Any,
    recv_counts: Any,
    recv_displacements: Any,
    dtype: Any,
    addr_length: Any,
    group: str = WORLD_GROUP,
) -> NoReturn:
    """Raise NotImplementedError: the operation reads from addresses in the NPU's memory."""
    del addrinfo, addrinfo_count_per_rank, recv_counts, recv_displacements, dtype, addr_length, group
    _refuse_addresses("gather_all_to_all_v", "tf.gather the elements, and exchange them with all_to_all_v")


def remote_read(tensorRemote: Any, data_type: Any) -> NoReturn:
    """Raise NotImplementedError: the operation reads another NPU's memory by address."""
    del tensorRemote, data_type
    _refuse_addresses("remote_read", "let the other rank send what is needed: send and receive, or all_to_all_v")


def remote_ref_read(tensorRemote: Any, cache: Any, offset: Any) -> NoReturn:
    """Raise NotImplementedError: the operation reads another NPU's memory by address."""
    del tensorRemote, cache, offset
    _refuse_addresses("remote_ref_read", "receive what the other rank sends, and assign it to the variable")


def remote_write(tensorRemote: Any, tensorLocal: Any, data_type: Any) -> NoReturn:
    """Raise NotImplementedError: the operation writes another NPU's memory by address."""
    del tensorRemote, tensorLocal, data_type
    _refuse_addresses("remote_write", "use send here and receive on the other rank")


def remote_scatter_write(tensorRemote: Any, tensorLocal: Any, offset: Any) -> NoReturn:
    """Raise NotImplementedError: the operation writes another NPU's memory by address."""
    del tensorRemote, tensorLocal, offset
    _refuse_addresses("remote_scatter_write", "use send here and receive on the other rank")


def _refuse_addresses(operation: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"hccl_ops.{operation} works on addresses in the memory of NPUs, which CPUs and GPUs under TensorFlow don't "
        f"have.\nWhat to do: {instead}."
    )
