"""One call of a collective operation: the ranks agree on it, and its body runs.

One ``Operation`` serves the three ways to run it. In eager mode and in a ``tf.function`` the ranks agree on the call
before data moves, or with the first data, and the body runs. In a graph for a session the call becomes an operation of
that graph (``sessions``), which does the same eagerly when the graph runs.

The ranks compare a fingerprint of the call: in shared memory with the first data, between hosts in a message before it.
Only if the fingerprints differ do they exchange the details. A list of gradients takes one agreement; the one in a
message depends on no gradient and ends long before backward produces the first one. Detecting a rank that waits for one
that never comes is left to ``stall``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.call import Agreement, Call, Route, Terms, describe, shapes_number
from npu_device._src.collectives.choice import comparing_backend_of, route_of
from npu_device._src.collectives.graph import require_order, runs_if_fetched
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.mismatch import mismatch


@dataclass(frozen=True)
class Operation:
    """One call of an operation, with checked arguments.

    Attributes:
        name: name of the operation.
        group: the ranks that take part.
        values: the values that the ranks compare: dense tensors, their specs, ``tf.IndexedSlices`` and ``None``.
        body: moves the data, once the ranks agree or together with the agreement, which it passes on; returns the
            results.
        again: returns the same operation for other inputs: a session's graph calls it with its values when it runs.
        inputs: the arguments of ``again``: tensors, numbers, or nested lists of them.
        results: returns the specs of the results, in the structure that the operation returns; None for an
            operation that returns nothing.
        same: whatever else must be the same on every rank.
        ragged: the first dimension of the values may differ among the ranks.
        gradient: in a session's graph, returns the gradients of the values for those of the results; None for an
            operation without gradients there.
        key: calls with the same key that wait at the same time in a session may run as one call with all their values,
            which returns one result for each value; ``again`` then takes one list. None for an operation that runs
            alone.
    """

    name: str
    group: Group
    values: Sequence[Any]
    body: Callable[[Agreement], Any]
    again: Callable[..., Operation]
    inputs: Sequence[Any] = ()
    results: Optional[Callable[[], Any]] = None
    same: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    gradient: Optional[Callable[[Job, Sequence[tf.Tensor]], Sequence[tf.Tensor]]] = None
    key: Optional[str] = None

    def run(self, job: Job, call: Call | None = None) -> Any:
        """Run the operation, and return its results. Every rank of the group calls this.

        Args:
            job: the job.
            call: the description; default: that of this call. A session's collective has one of the line that made it.

        Raises:
            RuntimeError: the call is in a function that XLA compiles, in one of a data set, or in a vectorized loop.
            MismatchError: the ranks' calls differ; in a tf.function it is raised as an error of the function, with the
                same text.
            PeerError: a rank has failed or left.
        """
        job.has_communicated = job.has_communicated or self.name != "barrier"
        call = call or describe(self.name, self.values, self.ragged, self.same)
        if runs_if_fetched():
            return job.sessions.place(self, call)
        group, eager = self.group, tf.executing_eagerly()
        if not eager:
            _refuse_xla(job, call)
        if group.size == 1:
            return self.body(Agreement(job))
        if eager:
            job.health.check(group.name, group.ranks)
        else:
            require_order(f"rank {job.cluster.rank}: {call.operation} was called at {call.line}")
        if group.tag is not None:
            call = replace(call, thread="")  # each tag keeps its own order, whichever threads send and receive
        with job.threads.in_call(group) as overlaps:

            def refuse(position: int) -> Exception:
                error = mismatch(job, group, call, position, overlaps)
                if not eager:
                    job.health.stop(str(error))  # the rest of the graph may already have started other collectives
                return error

            terms = Terms(call.fingerprint, call.row, overlaps, refuse)
            route, small = route_of(job, group, self.values, self.ragged)
            agreement = Agreement(job, terms, shapes_number(call, self.values, self.ragged), route, small)
            comparing = comparing_backend_of(job, group)
            if route is Route.BEFORE_DATA:
                with tf.control_dependencies(comparing.exchange_terms(agreement, group)):
                    return self.body(Agreement(job))
            try:
                results = self.body(agreement)
                if agreement.is_open:
                    comparing.exchange_terms(agreement, group)
                return results
            finally:
                agreement.take()


def _refuse_xla(job: Job, call: Call) -> None:
    """Refuse a call in a function that XLA compiles: there, the ranks can't agree on it, nor learn of a failure.

    Raises:
        RuntimeError: XLA compiles the function.
    """
    if compat.compiled_by_xla():
        raise RuntimeError(
            f"rank {job.cluster.rank}: {call.operation} was called at {call.line} in a function that XLA compiles "
            "(jit_compile=True), where a rank can't wait for the others.\n"
            "What to do: leave jit_compile out of tf.function; pass jit_compile=False to model.compile (on a GPU, "
            "Keras 3 turns XLA on by itself); or use npu.distribute.replicate(model), which turns it off."
        )
