"""Ascend's collective operators (``npu_device.distribute.hccl_ops``, ``npu_bridge.hccl.hccl_ops``).

They delegate to ``collectives``; this file only checks the arguments, and returns the data of a single device. The
signatures are those of the TensorFlow 1 adapter, which has all arguments of the TensorFlow 2 adapter in the same order.

``group`` is the name of a group, default the group of all ranks; ranks are ranks in the group. ``fusion`` and
``fusion_id`` are checked, and have no effect: every call is a transfer of its own. Operations and dtypes are those of
Ascend; float64 and the unsigned integers are reduced as well, and calls that only move data accept bool and complex.

Source: Ascend TF Adapter 2.x and 1.15, HCCL operators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import moves as _moves, ops as _ops
from npu_device._src.collectives.graph import overwriting
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.reduction import check_fusion, check_fusion_0_or_2, mark_reduced
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.world.world import World

_REDUCTIONS = ("sum", "max", "min", "prod")


@compat.do_not_convert
def allreduce(
    tensor: Any, reduction: str, fusion: int = 1, fusion_id: int = -1, group: str = WORLD_GROUP
) -> Any:
    """Reduce a tensor over the group; every rank gets the result.

    Args:
        tensor: any shape, the same on every rank.
        reduction: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``; ``"mean"`` is ``npu.distribute.all_reduce``'s.
        fusion, fusion_id: 0, 1 or 2, and -1 unless it is 2; without effect: each call is a collective of its own.
        group: name of the group.

    Returns:
        The same shape and dtype. The gradient of a sum is the sum of all ranks' incoming gradients, over the same
        group. On a single device ``tensor`` itself.

    Raises:
        ValueError: unknown reduction, group, or combination of fusion and fusion_id.
        TypeError: a dtype that can't be reduced.
    """
    check_fusion(fusion, fusion_id)
    _check_reduction("allreduce", reduction)
    world = current_world(group)
    if world is None:
        return tensor
    tensor = compat.to_tensor(tensor)
    reduced = _ops.all_reduce(world.job, tensor, reduction, world.group)
    mark_reduced(world.job, [reduced])
    return reduced


@compat.do_not_convert
def allgather(
    tensor: Any, rank_size: int, group: str = WORLD_GROUP, fusion: int = 0, fusion_id: int = -1
) -> Any:
    """Gather the tensors of all ranks along the first dimension.

    Args:
        tensor: shape [n, …], the same on every rank.
        rank_size: number of ranks in the group.
        group: name of the group.
        fusion, fusion_id: of the TensorFlow 1 adapter: 0, or 2 with an id of 0 or more; without effect.

    Returns:
        Shape [n * rank_size, …], ordered by group rank. On a single device ``tensor`` itself.

    Raises:
        ValueError: a scalar, unknown group, ``fusion`` neither 0 nor 2, or ``rank_size`` is not the size of the group.
        TypeError: a dtype that has no bits to send.
    """
    check_fusion_0_or_2("allgather", fusion, fusion_id)
    world = current_world(group)
    _check_rank_size("allgather", rank_size, group, world)
    if world is None:
        return tensor
    return _moves.all_gather(world.job, compat.to_tensor(tensor), world.group)


@compat.do_not_convert
def broadcast(
    tensor: Sequence, root_rank: int, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP
) -> list:
    """Send the tensors of the root to every rank. Nothing is assigned (``npu.distribute.broadcast`` does that); but in
    a graph for a session variables are overwritten when the result is fetched, as on Ascend.

    Args:
        tensor: a list of tensors or variables, with the same shapes and dtypes on every rank.
        root_rank: the group rank whose values are sent.
        fusion, fusion_id: 0, or 2 with an id of 0 or more; without effect.
        group: name of the group.

    Returns:
        A list of the values of the root. On a single device the members of the list.

    Raises:
        ValueError: the root is not in the group; unknown group; ``fusion`` neither 0 nor 2.
        TypeError: ``tensor`` is not a list or tuple; a dtype that has no bits to send.
    """
    check_fusion_0_or_2("broadcast", fusion, fusion_id)
    if not isinstance(tensor, (list, tuple)):
        raise TypeError(
            f"hccl_ops.broadcast takes a list; found type {type(tensor).__name__}: pass [tensor]"
        )
    world = current_world(group)
    if world is None:
        return list(tensor)
    tensors = list(map(compat.to_tensor, tensor))
    sent = _ops.broadcast(world.job, tensors, root_rank, world.group)
    # In the graph of a session, fetching a result overwrites the variable, as on Ascend.
    return list(map(overwriting, tensor, sent))


@compat.do_not_convert
def reduce(
    tensor: Any,
    reduction: str,
    root_rank: int,
    fusion: int = 0,
    fusion_id: int = -1,
    group: str = WORLD_GROUP,
) -> Any:
    """Reduce a tensor over the group; the root gets the result.

    Args:
        tensor: any shape, the same on every rank.
        reduction: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``.
        root_rank: the group rank that gets the result.
        fusion, fusion_id: 0, or 2 with an id of 0 or more; without effect.
        group: name of the group.

    Returns:
        The same shape and dtype; zeros on the other ranks. On a single device ``tensor`` itself.

    Raises:
        ValueError: unknown reduction or group; the root is not in the group; ``fusion`` neither 0 nor 2.
        TypeError: a dtype that can't be reduced.
    """
    check_fusion_0_or_2("reduce", fusion, fusion_id)
    _check_reduction("reduce", reduction)
    world = current_world(group)
    if world is None:
        return tensor
    tensor = compat.to_tensor(tensor)
    return _ops.reduce(world.job, tensor, reduction, root_rank, world.group)


@compat.do_not_convert
def reduce_scatter(
    tensor: Any,
    reduction: str,
    rank_size: int,
    group: str = WORLD_GROUP,
    fusion: int = 0,
    fusion_id: int = -1,
) -> Any:
    """Reduce a tensor over the group; each rank gets its block of the first dimension.

    Args:
        tensor: shape [n, …] with n a multiple of ``rank_size``, the same on every rank.
        reduction: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``.
        rank_size: number of ranks in the group.
        group: name of the group.
        fusion, fusion_id: of the TensorFlow 1 adapter: 0, or 2 with an id of 0 or more; without effect.

    Returns:
        Shape [n / rank_size, …]. On a single device ``tensor`` itself.

    Raises:
        ValueError: unknown reduction or group; a scalar; n is not a multiple of ``rank_size``; ``rank_size`` is not the
            size of the group; ``fusion`` neither 0 nor 2.
        TypeError: a dtype that can't be reduced.
    """
    check_fusion_0_or_2("reduce_scatter", fusion, fusion_id)
    _check_reduction("reduce_scatter", reduction)
    world = current_world(group)
    _check_rank_size("reduce_scatter", rank_size, group, world)
    if world is None:
        return tensor
    tensor = compat.to_tensor(tensor)
    return _ops.reduce_scatter(world.job, tensor, reduction, world.group)


@compat.do_not_convert
def send(tensor: Any, sr_tag: int, dest_rank: int, group: str = WORLD_GROUP) -> Any:
    """Send a tensor to one other rank, which calls ``receive`` with the same ``sr_tag``.

    Args:
        tensor: any shape.
        sr_tag: a whole number that pairs this call with that of the other side.
        dest_rank: the group rank that receives.
        group: name of the group.

    Returns:
        In a ``tf.function`` the operation, for control dependencies; in eager mode None.

    Raises:
        ValueError: unknown group; the rank is not in the group, or is this one; there is a single device only.
        TypeError: a dtype that has no bits to send.

    In eager mode, the call returns when the other rank has received: ranks that all send before they receive deadlock.
    Inside one ``tf.function`` they don't.
    """
    world = _require_world("send", group)
    tensor = compat.to_tensor(tensor)
    return _moves.send(world.job, tensor, sr_tag, dest_rank, world.group)


@compat.do_not_convert
def receive(
    shape: Any, data_type: Any, sr_tag: int, src_rank: int, group: str = WORLD_GROUP
) -> Any:
    """Receive the tensor that another rank sends with the same ``sr_tag``.

    Args:
        shape: the shape of the tensor sent, with every dimension known.
        data_type: its dtype.
        sr_tag: as in ``send`` on the other side.
        src_rank: the group rank that sends.
        group: name of the group.

    Returns:
        The tensor sent.

    Raises:
        ValueError: unknown group; the rank is not in the group, or is this one; there is a single device only; a
            dimension of ``shape`` is unknown.
        TypeError: a dtype that has no bits to send.
    """
    world = _require_world("receive", group)
    dtype = tf.as_dtype(data_type)
    return _moves.receive(world.job, shape, dtype, sr_tag, src_rank, world.group)


@compat.do_not_convert
def all_to_all_v(
    send_data: Any,
    send_counts: Any,
    send_displacements: Any,
    recv_counts: Any,
    recv_displacements: Any,
    group: str = WORLD_GROUP,
) -> Any:
    """Exchange blocks of different lengths among all ranks.

    Args:
        send_data: the buffer to send from, shape [n].
        send_counts: elements for each rank, shape [size of the group].
        send_displacements: where each of these blocks begins, in elements.
        recv_counts: elements from each rank.
        recv_displacements: where each of these blocks goes in the result, in elements.
        group: name of the group.

    Returns:
        Shape [end of the last received block], zeros where no block lies.

    Raises:
        ValueError: unknown group; ``send_data`` has more than one dimension; counts or displacements that don't fit it,
            each other or the group; a rank expects a different number of elements than it is sent.
        TypeError: a dtype that has no bits to send.
    """
    data = compat.to_tensor(send_data)
    world = current_world(group)
    if world is None:
        # Checked as on several ranks, so that wrong arguments are an error here, too.
        outgoing = _moves.checked_blocks("send", send_counts, send_displacements, 1, data.shape[0])
        incoming = _moves.checked_blocks("recv", recv_counts, recv_displacements, 1)
        blocks = _moves.pad_blocks(data, outgoing, incoming.counts[0])
        return _moves.join_blocks(blocks, incoming)
    return _moves.all_to_all_v(
        world.job,
        data,
        send_counts,
        send_displacements,
        recv_counts,
        recv_displacements,
        world.group,
    )


@compat.do_not_convert
def all_to_all_v_c(
    send_data: Any,
    send_count_matrix: Any,
    rank: int,
    fusion: int = 0,
    fusion_id: int = -1,
    group: str = WORLD_GROUP,
) -> Any:
    """Exchange blocks of different lengths among all ranks, each of which knows all ranks' counts.

    Args:
        send_data: the blocks for rank 0, 1, … one after the other, shape [n].
        send_count_matrix: elements that rank i (row) sends to rank j (column); the same on every rank.
        rank: the caller's own rank in the group.
        fusion, fusion_id: 0, or 2 with an id of 0 or more; without effect.
        group: name of the group.

    Returns:
        The blocks from rank 0, 1, … one after the other.

    Raises:
        ValueError: unknown group; ``rank`` is not the caller's; ``send_data`` has more than one dimension or too few
            elements; another shape of the matrix; ``fusion`` neither 0 nor 2.
        TypeError: a dtype that has no bits to send.
    """
    check_fusion_0_or_2("all_to_all_v_c", fusion, fusion_id)
    data = compat.to_tensor(send_data)
    world = current_world(group)
    own_rank = 0
    if world is not None:
        own_rank = world.rank
    if rank != own_rank:
        raise ValueError(
            f"all_to_all_v_c: rank is the caller's own in group {group!r}; found {rank!r}, expected {own_rank}"
        )
    if world is None:
        matrix = _moves.whole_numbers("send_count_matrix", send_count_matrix, [1, 1])
        return tf.slice(data, [0], matrix[0])
    return _moves.all_to_all_vc(world.job, data, send_count_matrix, world.group)


alltoallv = all_to_all_v
alltoallvc = all_to_all_v_c


def _generated(name: str, function: Callable, **names: str) -> Callable:
    """Return an operator under the names of Ascend's generated one (``gen_npu_ops``), given by the names here."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        new_name = names.get(parameter.name, parameter.name)
        parameters.append(parameter.replace(name=new_name))
    renamed = signature.replace(parameters=parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = renamed.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*bound.args)

    call.__name__ = call.__qualname__ = name
    # ``functools.wraps`` alone would show the parameter names of ``function``.
    call.__signature__ = renamed  # type: ignore[attr-defined]
    for own_name, new_name in names.items():
        call.__doc__ = str(call.__doc__).replace(f" {own_name}: ", f" {new_name}: ")
    return compat.do_not_convert(call)


hcom_all_reduce = _generated("hcom_all_reduce", allreduce, tensor="input")
hcom_all_gather = _generated("hcom_all_gather", allgather, tensor="input")
hcom_broadcast = _generated("hcom_broadcast", broadcast, tensor="input")
hcom_reduce = _generated("hcom_reduce", reduce, tensor="input")
hcom_reduce_scatter = _generated("hcom_reduce_scatter", reduce_scatter, tensor="input")
hcom_send = _generated("hcom_send", send, tensor="input")
hcom_receive = _generated("hcom_receive", receive, data_type="T")
hcom_all_to_all_v = all_to_all_v
hcom_all_to_all_vc = all_to_all_v_c


def _require_world(operation: str, group: str) -> World:
    world = current_world(group)
    if world is None:
        raise ValueError(
            f"hccl_ops.{operation} needs another rank, and this is a single device.\nWhat to do: call it only when "
            "npu.open().workers_num is greater than 1."
        )
    return world


def _check_reduction(operation: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        hint = ""
        if reduction == "mean":
            hint = "; npu.distribute.all_reduce knows 'mean'"
        raise ValueError(
            f"hccl_ops.{operation}: reduction {reduction!r} is unknown; expected one of "
            f"{', '.join(map(repr, _REDUCTIONS))}{hint}"
        )


def _check_rank_size(operation: str, rank_size: int, group: str, world: World | None) -> None:
    size = 1
    if world is not None:
        size = world.size
    if rank_size != size:
        raise ValueError(
            f"hccl_ops.{operation}: rank_size {rank_size!r} is not the size of group {group!r}, {size}"
        )
