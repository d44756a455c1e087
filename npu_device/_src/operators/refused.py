"""Ascend's operators that can't be provided here: calling them raises an error that says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from npu_device._src.collectives.group import WORLD_GROUP


def deformable_conv2d(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise NotImplementedError: TensorFlow has no such operation.

    Args:
        *arguments: ignored.
        **keywords: ignored.

    Raises:
        NotImplementedError: always.
    """
    del arguments, keywords
    raise NotImplementedError(
        "npu_cube_ops.deformable_conv2d is an operator of the NPU; TensorFlow has none for CPUs and GPUs.\n"
        "What to do: sample the input at the shifted places with tf.gather_nd, four neighbours each, weight them "
        "bilinearly, and give the result to tf.nn.conv2d with the size of the kernel as its stride."
    )


def embeddingrankid(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise NotImplementedError: the operation gives addresses in other NPUs' memory.

    Args:
        *arguments: ignored.
        **keywords: ignored.

    Raises:
        NotImplementedError: always.
    """
    del arguments, keywords
    raise NotImplementedError(
        "npu_cpu_ops.embeddingrankid gives addresses in the memory of NPUs, which CPUs and GPUs under TensorFlow don't "
        "have.\nWhat to do: the rank that owns a row is index % rank_size (or index // rows_per_rank); exchange the "
        "rows with hccl_ops.all_to_all_v."
    )


def gradient(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise NotImplementedError: TensorFlow differentiates the operators, and never calls their gradients by name.

    Args:
        *arguments: ignored.
        **keywords: ignored.

    Raises:
        NotImplementedError: always.
    """
    del arguments, keywords
    raise NotImplementedError(
        "the gradients in gen_npu_ops were removed in 0.2.0: TensorFlow differentiates its operators itself.\n"
        "What to do: tape.gradient of the results, or tf.gradients in the graph of a session."
    )


def gather_all_to_all_v(
    addrinfo: Any,
    addrinfo_count_per_rank: Any,
    recv_counts: Any,
    recv_displacements: Any,
    dtype: Any,
    addr_length: Any,
    group: str = WORLD_GROUP,
) -> NoReturn:
    """Raise NotImplementedError: the operation reads from addresses in the memory of the NPU.

    Args:
        addrinfo, addrinfo_count_per_rank, recv_counts, recv_displacements, dtype, addr_length, group: ignored.

    Raises:
        NotImplementedError: always.
    """
    del addrinfo, addrinfo_count_per_rank, recv_counts, recv_displacements, dtype, addr_length, group
    _refuse_addresses("gather_all_to_all_v", "tf.gather the elements, and exchange them with all_to_all_v")


def remote_read(tensorRemote: Any, data_type: Any) -> NoReturn:
    """Raise NotImplementedError: the operation reads the memory of another NPU by address.

    Args:
        tensorRemote, data_type: ignored.

    Raises:
        NotImplementedError: always.
    """
    del tensorRemote, data_type
    _refuse_addresses("remote_read", "let the other rank send what is needed: send and receive, or all_to_all_v")


def remote_ref_read(tensorRemote: Any, cache: Any, offset: Any) -> NoReturn:
    """Raise NotImplementedError: the operation reads the memory of another NPU by address.

    Args:
        tensorRemote, cache, offset: ignored.

    Raises:
        NotImplementedError: always.
    """
    del tensorRemote, cache, offset
    _refuse_addresses("remote_ref_read", "receive what the other rank sends, and assign it to the variable")


def remote_write(tensorRemote: Any, tensorLocal: Any, data_type: Any) -> NoReturn:
    """Raise NotImplementedError: the operation writes the memory of another NPU by address.

    Args:
        tensorRemote, tensorLocal, data_type: ignored.

    Raises:
        NotImplementedError: always.
    """
    del tensorRemote, tensorLocal, data_type
    _refuse_addresses("remote_write", "use send here and receive on the other rank")


def remote_scatter_write(tensorRemote: Any, tensorLocal: Any, offset: Any) -> NoReturn:
    """Raise NotImplementedError: the operation writes the memory of another NPU by address.

    Args:
        tensorRemote, tensorLocal, offset: ignored.

    Raises:
        NotImplementedError: always.
    """
    del tensorRemote, tensorLocal, offset
    _refuse_addresses("remote_scatter_write", "use send here and receive on the other rank")


def _refuse_addresses(operation: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"hccl_ops.{operation} works on addresses in the memory of NPUs, which CPUs and GPUs under TensorFlow don't "
        f"have.\nWhat to do: {instead}."
    )
