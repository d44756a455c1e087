"""One call of a collective operation: the ranks agree on it, and its body runs on the backend that is chosen here.

One ``Operation`` serves the three ways to run it. In eager mode and in a ``tf.function`` the ranks agree on the call
before data moves, or with the first data, and the body runs. In a graph for a session the call becomes an operation of
that graph (``sessions``), which does the same eagerly when the graph runs.

The ranks compare a fingerprint of the call: in shared memory with the first data, between hosts in a message before it,
with which small data travel. Only if the fingerprints differ do they exchange the details. A list of gradients takes
one agreement; the one in a message depends on no gradient and ends long before backward produces the first one.

A group whose ranks share memory uses that. All other groups use the engine between hosts (``engine_choice``), among all
of their ranks. But if hosts have several of a group's ranks, each host reduces and spreads in shared memory, and only
one rank per host uses the engine. If that is NCCL, floating-point tensors go through it in every group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.call import Agreement, Call, Route, Terms, describe, mismatch, shapes_number
from npu_device._src.collectives.engines.engines import BETWEEN_HOSTS, TWO_LEVEL, messages, shared_memory
from npu_device._src.collectives.engines.host.sockets import fits
from npu_device._src.collectives.engines.tensorflow import engine as tensorflow_backend
from npu_device._src.collectives.gpu_choice import UNVERIFIED
from npu_device._src.collectives.graph import require_order, runs_if_fetched
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_SHOWN_PORTS = 8


@dataclass(frozen=True)
class Operation:
    """One call of an operation, with checked arguments.

    Attributes:
        values: what the ranks compare: dense tensors, their specs, ``tf.IndexedSlices`` and ``None``.
        body: moves the data, given the agreement, which it passes on, and the inputs.
        inputs: the values and what else the body is given; None for the values only.
        results: returns the specs of the results, in their structure; None for an operation that returns nothing.
        same: whatever else must be the same on every rank.
        ragged: the first dimension of the values may differ among the ranks.
        gradient: in the graph of a session, returns the gradients of the values for those of the results.
    """

    name: str
    group: Group
    values: Sequence[Any]
    body: Callable[..., Any]
    inputs: Optional[Sequence[Any]] = None
    results: Optional[Callable[[], Any]] = None
    same: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    gradient: Optional[Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]] = None

    def run(self, job: Job, call: Call | None = None) -> Any:
        """Run the operation, and return its results. Every rank of the group calls this.

        ``call`` describes the call if it was made elsewhere: in the graph of the session that runs it. In a tf.function
        a MismatchError is raised as an error of the function, with the same text.
        """
        job.has_communicated = job.has_communicated or self.name != "barrier"
        call = call or describe(self.name, self.values, self.ragged, self.same)
        if runs_if_fetched():
            return job.sessions.add(self, call)
        group, eager = self.group, tf.executing_eagerly()
        inputs = self.values if self.inputs is None else self.inputs
        if not eager and compat.compiled_by_xla():
            raise RuntimeError(
                f"rank {job.cluster.rank}: {call.operation} was called at {call.line} in a function that XLA compiles "
                "(jit_compile=True), where a rank can't wait for the others.\n"
                "What to do: leave jit_compile out of tf.function; pass jit_compile=False to model.compile (on a GPU, "
                "Keras 3 turns XLA on by itself); or use npu.distribute.replicate(model), which turns it off."
            )
        if group.size == 1:
            return self.body(Agreement(job), *inputs)
        if eager:
            job.health.check(group.name, group.ranks)
        else:
            require_order(f"rank {job.cluster.rank}: {call.operation} was called at {call.line}")
        if group.tag is not None:
            call = replace(call, thread="")  # each tag keeps its own order, whichever threads send and receive
        with job.threads.in_call(group) as overlaps:

            def refuse(position: int) -> Exception:
                error = mismatch(job, group, {**call.row(), "overlaps": overlaps}, position)
                if not eager:
                    job.health.stop(str(error))  # the rest of the graph may already have started other collectives
                return error

            shapes = shapes_number(call, self.values, self.ragged)
            terms = Terms(call.fingerprint, shapes, call.row, overlaps, refuse)
            agreement = Agreement(job, terms, *route_of(job, group, self.values, self.ragged))
            comparing = shared_memory if _number_of_hosts(job, group) == 1 else messages
            if agreement.route is Route.BEFORE_DATA:
                with tf.control_dependencies(comparing.exchange_terms(agreement, group)):
                    return self.body(Agreement(job), *inputs)
            try:
                results = self.body(agreement, *inputs)
                if agreement.terms is not None:
                    comparing.exchange_terms(agreement, group)
                return results
            finally:
                agreement.take()


# The backends


def _number_of_hosts(job: Job, group: Group) -> int:
    """Return into how many parts a group falls: the ranks of a part share memory."""
    return len(set(map(job.hosts.leaders.__getitem__, group.ranks)))


def route_of(job: Job, group: Group, values: Sequence[Any], ragged: bool) -> tuple[Route, tf.Tensor | None]:
    """Return how the ranks compare a call; and for ``BY_SIZE``, whether its data are small, a bool tensor."""
    if group.tag is not None:  # a send and its receive
        return Route.WITH_DATA, None
    hosts = job.hosts
    nccl = hosts.engine == "nccl" and any(hosts.uses_nccl(value.dtype) for value in values if value is not None)
    if not nccl and _number_of_hosts(job, group) == 1:
        return Route.WITH_DATA, None
    if nccl or ragged or not all(isinstance(value, (tf.Tensor, tf.TensorSpec)) for value in values):
        return Route.BEFORE_DATA, None
    small = fits(group.size, values)
    if isinstance(small, bool):
        return (Route.IN_MESSAGE if small else Route.BEFORE_DATA), None
    return Route.BY_SIZE, small


def backend_of(agreement: Agreement, group: Group, dtype: tf.DType, divides: bool = False) -> Any:
    """Return the backend that moves a call's tensors of a dtype, the same on every rank; two in one if only the running
    graph knows whether the data are small. A call that ``divides`` can be two levels.
    """
    own = _own_backend_of(agreement.job, group, dtype, divides)
    if agreement.route is Route.WITH_DATA:
        return own
    return messages if agreement.route is Route.IN_MESSAGE else _Either(own, group)


class _Either:
    """The backend of messages or the group's own, as the running graph decides."""

    def __init__(self, own: Any, group: Group) -> None:
        self._own, self._group = own, group

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def decide(agreement: Agreement, *arguments: Any) -> Any:
            job, terms = agreement.job, agreement.take()

            def small() -> Any:
                return getattr(messages, call)(Agreement(job, terms), *arguments)

            def large() -> Any:
                with tf.control_dependencies(messages.exchange_terms(Agreement(job, terms), self._group)):
                    return getattr(self._own, call)(Agreement(job), *arguments)

            return tf.cond(agreement.small, small, large)

        return decide


def _own_backend_of(job: Job, group: Group, dtype: tf.DType, divides: bool) -> Any:
    if job.hosts.uses_nccl(dtype):
        return tensorflow_backend
    hosts = _number_of_hosts(job, group)
    if hosts == 1:
        return shared_memory
    return (TWO_LEVEL if divides and hosts < group.size else BETWEEN_HOSTS)[job.hosts.engine]


def backend_name(job: Job, group: Group, dtypes: Iterable[tf.DType]) -> str:
    """Return the name of the engine that serves a group's call between its hosts; on one host, "shared_memory"."""
    hosts = job.hosts
    if any(map(hosts.uses_nccl, dtypes)):
        return "nccl"
    if _number_of_hosts(job, group) == 1:
        return "shared_memory"
    return "tensorflow" if hosts.engine == "nccl" else hosts.engine


def explained(job: Job, group: Group) -> str:
    """Return in words which backend reduces the gradients of a group, and why."""
    hosts, name = job.hosts, backend_name(job, group, [tf.float32])
    wanted = environment.NPU_DEVICE_BACKEND.get()
    chosen = f"NPU_DEVICE_BACKEND is {wanted}" if wanted == name else ""
    if name == "shared_memory":
        return "shared memory: all ranks share that of one host"
    if name == "nccl":
        return f"TensorFlow's collectives with NCCL: {chosen or 'each rank has a GPU of its own'} ({UNVERIFIED})"
    library = f"MPI ({job.mpi_world.library})" if job.mpi_world else "MPI"
    engine = {"mpi": library, "tcp": "TCP"}.get(name, "TensorFlow's ring over gRPC")
    why = "ranks of one host can't share memory" if any(hosts.problems) else "each rank has a host to itself"
    if _own_backend_of(job, group, tf.float32, True) in TWO_LEVEL.values():
        engine, why = f"shared memory within each host, and {engine} between them", "hosts have several ranks"
    elif environment.NPU_DEVICE_SHARED_MEMORY.get() == "off":
        why = "NPU_DEVICE_SHARED_MEMORY is off"
    why = f"{chosen}, and {why}" if chosen else why
    return f"{engine}: {why}" + (f". Not MPI: {job.why_no_mpi}" if job.why_no_mpi else "")


def open_ports(job: Job) -> str:
    """Return in words where this job's ranks serve whoever reaches them, without the job secret; "" if they don't."""
    shown, more = ", ".join(job.server_addresses[:_SHOWN_PORTS]), len(job.server_addresses) - _SHOWN_PORTS
    shown += f" and {more} more" if more > 0 else ""
    return f"TensorFlow's servers at {shown} serve whoever reaches them, without the job secret" if shown else ""


def row_length(job: Job, group: Group, dtype: tf.DType, longest: tf.Tensor) -> tf.Tensor:
    """Return to how many elements rows of different lengths are padded, given the longest; the same on every rank."""
    rounds = _own_backend_of(job, group, dtype, False) is tensorflow_backend
    return tensorflow_backend.rounded(longest) if rounds else longest
