"""Choose the backend for a call; the operations use this module.

A group whose ranks share memory uses that. One that spans hosts, some of which have several of its ranks, reduces and
spreads on each host in shared memory, and uses another backend between them. That one, which all other groups use as
well, is MPI if it connects all ranks of the job (``mpi.opening``), or else TCP. If each rank of the job has a GPU of
its own, floating-point tensors go through TensorFlow and NCCL in every group; ``NPU_DEVICE_BACKEND`` can choose
TensorFlow for all tensors. Where the ranks have to compare a call before its data moves, small data travel with the
comparison: among all ranks at once, whichever host they are on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable, TypeVar

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.backends.arrays.operations import ArrayBackend, ComparingBackend
from npu_device._src.collectives.backends.contract import Backend, ReducingBackend
from npu_device._src.collectives.backends.messages.messages_backend import messages
from npu_device._src.collectives.backends.messages.programs import fits
from npu_device._src.collectives.backends.mpi.mpi_backend import mpi
from npu_device._src.collectives.backends.shared_memory.shared_memory_backend import shared_memory
from npu_device._src.collectives.backends.tcp.tcp_backend import tcp
from npu_device._src.collectives.backends.tensorflow import lengths
from npu_device._src.collectives.backends.tensorflow import operations as tensorflow_backend
from npu_device._src.collectives.backends.two_level import TwoLevelBackend
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.terms import Agreement

_Moved = TypeVar("_Moved")

_two_level: dict[Backend, TwoLevelBackend] = {one: TwoLevelBackend(one) for one in (mpi, tcp)}
_NAMES: dict[ArrayBackend, str] = {shared_memory: "shared_memory", mpi: "mpi", tcp: "tcp"}


def comparing_backend_of(job: Job, group: Group) -> ComparingBackend:
    """Return the backend through which a group's ranks compare their calls; the same on every rank."""
    return shared_memory if _number_of_hosts(job, group) == 1 else messages


def _number_of_hosts(job: Job, group: Group) -> int:
    """Return into how many parts a group falls: the ranks of a part share memory."""
    leaders = job.hosts.leaders
    return len({leaders[rank] for rank in group.ranks})


def carries(job: Job, group: Group, values: Sequence[Any], ragged: bool = False) -> bool | tf.Tensor | None:
    """Return whether a call's values travel with the message in which the ranks compare it, which otherwise precedes
    them: a bool tensor if only the running graph knows. None if the ranks compare the call with its first data instead.
    The same on every rank.

    Args:
        job: the job.
        group: the ranks that take part.
        values: dense tensors, their specs, ``tf.IndexedSlices`` and ``None``.
        ragged: their size may differ among the ranks.
    """
    if group.tag is not None:
        small = _own_backend_of(job, group, tf.int32) is tensorflow_backend and fits(group.size, values)
        return None if small is False else small  # the two always compare a call with its first data
    dtypes = [value.dtype for value in values if value is not None]
    if array_backend_of(job, group, dtypes) is shared_memory:
        return None
    dense = all(isinstance(value, (tf.Tensor, tf.TensorSpec)) for value in values)
    if ragged or not dense or any(map(job.hosts.uses_nccl, dtypes)):
        return False
    return fits(group.size, values)


def array_backend_of(job: Job, group: Group, dtypes: Iterable[tf.DType]) -> ArrayBackend | None:
    """Return the backend that serves all of a group's call on tensors of some dtypes; the same on every rank. None if
    some of them go through TensorFlow. Other modules ask this function which backend serves a call.
    """
    if any(map(job.hosts.uses_nccl, dtypes)):
        return None
    if comparing_backend_of(job, group) is shared_memory:
        return shared_memory
    if job.mpi_world is not None:
        return mpi
    return None if job.hosts.all_through_tensorflow else tcp


def through_backend(
    agreement: Agreement, group: Group, dtype: tf.DType, move: Callable[[Backend, Agreement], _Moved]
) -> _Moved:
    """Return ``move(backend, agreement)`` for the backend that moves a call's tensors of a dtype; the same on every
    rank.
    """
    return _or_carried(agreement, group, _own_backend_of(agreement.job, group, dtype), move)


def through_reducing_backend(
    agreement: Agreement, group: Group, dtype: tf.DType, move: Callable[[ReducingBackend, Agreement], _Moved]
) -> _Moved:
    """Do the same for the calls that a group of several hosts can divide between its hosts."""
    return _or_carried(agreement, group, _own_reducing_backend_of(agreement.job, group, dtype), move)


def _or_carried(
    agreement: Agreement, group: Group, own: ReducingBackend, move: Callable[[Any, Agreement], _Moved]
) -> _Moved:
    """Move a call's data on the group's own backend, or in messages if they are small. If only the running graph knows
    that, both are in it.
    """
    if agreement.carries is None:
        return move(own, agreement)
    carrying = comparing_backend_of(agreement.job, group)
    if agreement.carries is True:
        return move(carrying, agreement)
    job, terms = agreement.job, agreement.take()

    def carried() -> _Moved:
        return move(carrying, Agreement(job, *terms))

    def usual() -> _Moved:
        if group.tag is not None:
            return move(own, Agreement(job, *terms))
        with tf.control_dependencies(carrying.exchange_terms(Agreement(job, *terms), group)):
            return move(own, Agreement(job))

    moved: _Moved = tf.cond(agreement.carries, carried, usual)
    return moved


def _own_backend_of(job: Job, group: Group, dtype: tf.DType) -> Backend:
    return array_backend_of(job, group, [dtype]) or tensorflow_backend


def _own_reducing_backend_of(job: Job, group: Group, dtype: tf.DType) -> ReducingBackend:
    chosen = _own_backend_of(job, group, dtype)
    if not job.hosts.uses_nccl(dtype) and 1 < _number_of_hosts(job, group) < group.size:
        return _two_level[chosen]
    return chosen


def backend_name(job: Job, group: Group, dtypes: Iterable[tf.DType]) -> str:
    """Return the name, as in ``NPU_DEVICE_BACKEND``, of the backend that serves a group's call between its hosts."""
    chosen = array_backend_of(job, group, dtypes)
    return "tensorflow" if chosen is None else _NAMES[chosen]


def explained(job: Job, group: Group) -> str:
    """Return in words which backend reduces a group's gradients, and why."""
    hosts, name = job.hosts, backend_name(job, group, [tf.float32])
    if name == "shared_memory":
        return "shared memory: all ranks share that of one host"
    world, wanted = job.mpi_world, environment.NPU_DEVICE_BACKEND.get()
    between = "TCP" if name == "tcp" else "TensorFlow's ring over gRPC" if world is None else f"MPI ({world.library})"
    if isinstance(_own_reducing_backend_of(job, group, tf.float32), TwoLevelBackend):
        text, why = f"shared memory within each host, and {between} between them", "hosts have several ranks"
    elif not hosts.no_nccl:
        text, why = "TensorFlow's collectives with NCCL", "each rank has a GPU of its own"
    else:
        text = between
        why = "ranks of one host can't share memory" if any(hosts.problems) else "each rank has a host to itself"
        if wanted == name:
            why = f"NPU_DEVICE_BACKEND is {wanted}"
    return f"{text}: {why}" + (f". Not MPI: {job.why_no_mpi}" if job.why_no_mpi else "")


def packs(job: Job, group: Group, dtype: tf.DType) -> bool:
    """Return whether a segment's tensors are packed into one buffer before they are sent."""
    return _own_reducing_backend_of(job, group, dtype) is tensorflow_backend


def release(job: Job, name: str) -> None:
    """Free what is held for a group that is destroyed."""
    shared_memory.release(job, name)
    mpi.release(job, name)
    tcp.release(job, name)
    messages.release(job, name)
    job.stall_watch.forget(name)


def row_length(job: Job, group: Group, dtype: tf.DType, longest: tf.Tensor) -> tf.Tensor:
    """Return to how many elements rows of different lengths are padded, given the longest; the same on every rank."""
    return lengths.rounded(longest) if _own_backend_of(job, group, dtype) is tensorflow_backend else longest
