"""Choose the backend for a call; the operations use this module.

A group whose ranks share memory uses that. All other groups use the engine between hosts (``engine_choice``), among all
of their ranks. But if hosts have several of a group's ranks, each host reduces and spreads in shared memory, and only
one rank per host uses the engine. If that is NCCL, floating-point tensors go through it in every group, and the others
through TensorFlow's ring. Where the ranks have to compare a call before its data moves, small data travel with the
comparison: among all ranks at once, whichever host they are on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.call import Agreement, Route
from npu_device._src.collectives.engines.contract import Backend, ReducingBackend
from npu_device._src.collectives.engines.host.engines import messages, mpi, shared_memory, tcp
from npu_device._src.collectives.engines.host.host_engine import HostEngine
from npu_device._src.collectives.engines.host.small_messages import fits
from npu_device._src.collectives.engines.tensorflow import engine as tensorflow_backend
from npu_device._src.collectives.engines.tensorflow import lengths
from npu_device._src.collectives.engines.two_level import TwoLevelBackend
from npu_device._src.collectives.gpu_choice import UNVERIFIED
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_ENGINES: dict[str, Backend] = {"nccl": tensorflow_backend, "mpi": mpi, "tensorflow": tensorflow_backend, "tcp": tcp}
_TWO_LEVEL = {name: TwoLevelBackend(engine) for name, engine in _ENGINES.items()}
_SHOWN_PORTS = 8


def comparing_backend_of(job: Job, group: Group) -> HostEngine:
    """Return the backend through which a group's ranks compare their calls; the same on every rank."""
    return shared_memory if _number_of_hosts(job, group) == 1 else messages


def _number_of_hosts(job: Job, group: Group) -> int:
    """Return into how many parts a group falls: the ranks of a part share memory."""
    return len(set(map(job.hosts.leaders.__getitem__, group.ranks)))


def route_of(job: Job, group: Group, values: Sequence[Any], ragged: bool) -> tuple[Route, tf.Tensor | None]:
    """Return how the ranks compare a call; and for ``BY_SIZE``, whether its data are small, a bool tensor.

    Args:
        job: the job.
        group: the ranks that take part.
        values: dense tensors, their specs, ``tf.IndexedSlices`` and ``None``.
        ragged: their size may differ among the ranks.
    """
    if group.tag is not None:  # a send and its receive
        return Route.WITH_DATA, None
    nccl = job.hosts.engine == "nccl" and any(value.dtype.is_floating for value in values if value is not None)
    if not nccl and comparing_backend_of(job, group) is shared_memory:
        return Route.WITH_DATA, None
    if nccl or ragged or not all(isinstance(value, (tf.Tensor, tf.TensorSpec)) for value in values):
        return Route.BEFORE_DATA, None
    small = fits(group.size, values)
    if isinstance(small, bool):
        return (Route.IN_MESSAGE if small else Route.BEFORE_DATA), None
    return Route.BY_SIZE, small


def backend_of(agreement: Agreement, group: Group, dtype: tf.DType) -> Backend:
    """Return the backend that moves a call's tensors of a dtype; the same on every rank."""
    own = _own_backend_of(agreement.job, group, dtype)
    return own if agreement.route is Route.WITH_DATA else _or_messages(agreement, group, own)


def reducing_backend_of(agreement: Agreement, group: Group, dtype: tf.DType) -> ReducingBackend:
    """Return the backend for a call that a group of several hosts can divide between its hosts."""
    own = _own_reducing_backend_of(agreement.job, group, dtype)
    return own if agreement.route is Route.WITH_DATA else _or_messages(agreement, group, own)


def _or_messages(agreement: Agreement, group: Group, own: ReducingBackend) -> Any:
    """Return the backend of messages if a call's data are small. If only the running graph knows that, both are in
    it.
    """
    carrying = comparing_backend_of(agreement.job, group)
    return carrying if agreement.route is Route.IN_MESSAGE else _Either(own, carrying, group)


class _Either:
    """A backend that decides in the running graph: small data travel in messages, others on the group's own backend."""

    def __init__(self, own: Any, carrying: HostEngine, group: Group) -> None:
        self._own, self._carrying, self._group = own, carrying, group

    def __getattr__(self, call: str) -> Callable[..., Any]:
        return functools.partial(self._decide, call)

    def _decide(self, call: str, agreement: Agreement, *arguments: Any) -> Any:
        job, terms = agreement.job, agreement.take()

        def small() -> Any:
            return getattr(self._carrying, call)(Agreement(job, *terms), *arguments)

        def large() -> Any:
            compared = self._carrying.exchange_terms(Agreement(job, *terms), self._group)
            with tf.control_dependencies(compared):
                return getattr(self._own, call)(Agreement(job), *arguments)

        return tf.cond(agreement.small, small, large)


def _own_backend_of(job: Job, group: Group, dtype: tf.DType) -> Backend:
    if job.hosts.engine == "nccl" and dtype.is_floating:
        return tensorflow_backend
    return shared_memory if _number_of_hosts(job, group) == 1 else _ENGINES[job.hosts.engine]


def _own_reducing_backend_of(job: Job, group: Group, dtype: tf.DType) -> ReducingBackend:
    own = _own_backend_of(job, group, dtype)
    if own is shared_memory or job.hosts.uses_nccl(dtype) or _number_of_hosts(job, group) == group.size:
        return own
    return _TWO_LEVEL[job.hosts.engine]


def backend_name(job: Job, group: Group, dtypes: Iterable[tf.DType]) -> str:
    """Return the name of what serves a group's call between its hosts: ``"shared_memory"`` on one host, or else the
    engine's, as in ``NPU_DEVICE_BACKEND``.
    """
    hosts = job.hosts
    if any(map(hosts.uses_nccl, dtypes)):
        return "nccl"
    if comparing_backend_of(job, group) is shared_memory:
        return "shared_memory"
    return "tensorflow" if hosts.engine == "nccl" else hosts.engine


def explained(job: Job, group: Group) -> str:
    """Return in words which backend reduces a group's gradients, and why."""
    hosts, name = job.hosts, backend_name(job, group, [tf.float32])
    wanted = environment.NPU_DEVICE_BACKEND.get()
    chosen = f"NPU_DEVICE_BACKEND is {wanted}" if wanted == name else ""
    if name == "shared_memory":
        return "shared memory: all ranks share that of one host"
    if name == "nccl":
        why = chosen or "each rank has a GPU of its own"
        return f"TensorFlow's collectives with NCCL: {why} ({UNVERIFIED})"
    world = job.mpi_world
    engine = {"mpi": f"MPI ({world.library})" if world else "MPI", "tcp": "TCP"}.get(
        name, "TensorFlow's ring over gRPC"
    )
    if isinstance(_own_reducing_backend_of(job, group, tf.float32), TwoLevelBackend):
        text, why = f"shared memory within each host, and {engine} between them", "hosts have several ranks"
    elif environment.NPU_DEVICE_SHARED_MEMORY.get() == "off":
        text, why = engine, "NPU_DEVICE_SHARED_MEMORY is off"
    else:
        text = engine
        why = "ranks of one host can't share memory" if any(hosts.problems) else "each rank has a host to itself"
    why = f"{chosen}, and {why}" if chosen else why
    return f"{text}: {why}" + (f". Not MPI: {job.why_no_mpi}" if job.why_no_mpi else "")


def open_ports(job: Job) -> str:
    """Return in words where this job's ranks serve whoever reaches them, without the job secret; "" if they don't."""
    addresses = job.server_addresses
    if not addresses:
        return ""
    shown = ", ".join(addresses[:_SHOWN_PORTS])
    more = f" and {len(addresses) - _SHOWN_PORTS} more" if len(addresses) > _SHOWN_PORTS else ""
    return f"TensorFlow's servers at {shown}{more} serve whoever reaches them, without the job secret"


def packs(job: Job, group: Group, dtype: tf.DType) -> bool:
    """Return whether a segment's tensors are packed into one buffer before they are sent."""
    return _own_reducing_backend_of(job, group, dtype) is tensorflow_backend


def row_length(job: Job, group: Group, dtype: tf.DType, longest: tf.Tensor) -> tf.Tensor:
    """Return to how many elements rows of different lengths are padded, given the longest; the same on every rank."""
    return lengths.rounded(longest) if _own_backend_of(job, group, dtype) is tensorflow_backend else longest
