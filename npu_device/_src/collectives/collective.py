"""One call of a collective: the ranks agree on it, and its body moves the data through the agreed engine.

One ``Collective`` serves the three ways to run it. In eager mode and in a ``tf.function`` the ranks agree on the call
before data moves, or with the first data, and the body runs. In a graph for a session the call becomes an operation of
that graph (``sessions``), which does the same eagerly when the graph runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Optional

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.rank_errors import PeerError
from npu_device._src.collectives.agreed_engine import AgreedEngine, Route, route_of
from npu_device._src.collectives.call import (
    Call,
    Terms,
    describe,
    mismatch,
    shapes_digest,
    wrapped,
)
from npu_device._src.collectives.calling_threads import Exchange, calling_thread
from npu_device._src.collectives.graph import differentiable, require_order, runs_if_fetched
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job


@dataclass(frozen=True)
class Collective:
    """One call of a collective, with checked arguments.

    Attributes:
        values: what the ranks compare: dense tensors, their specs, ``tf.IndexedSlices`` and ``None``.
        body: moves the data, given the engine of the call and the inputs.
        inputs: the values and what else the body is given; None for the values only.
        result_specs: returns the specs of the results, in their structure; None for a collective that returns nothing.
        details: whatever else must be the same on every rank.
        is_ragged: the first dimension of the values may differ among the ranks.
        has_owners: some of the values belong to one rank each.
        gradient: in the graph of a session, turns gradients of the results into gradients of the values.
    """

    name: str
    group: Group
    values: Sequence
    body: Callable
    inputs: Optional[Sequence] = None
    result_specs: Optional[Callable[[], Any]] = None
    details: dict[str, Any] = field(default_factory=dict)
    is_ragged: bool = False
    has_owners: bool = False
    gradient: Optional[Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]] = None

    def run(self, job: Job, call: Call | None = None) -> Any:
        """Run the collective, and return its results. Every rank of the group calls this.

        ``call`` describes the call if it was made elsewhere: in the graph of the session that runs it. In a tf.function
        a MismatchError is raised as an error of the function, with the same text.
        """
        job.has_communicated = job.has_communicated or self.name != "barrier"
        # In a session's run, the line of the script was noted when the graph was built.
        call = call or describe(self.name, self.values, self.is_ragged, self.details)
        if runs_if_fetched():
            return self._add_to_session(job, call)
        group = self.group
        inputs = self._body_inputs()
        _require_no_xla(job, call)
        # A rank alone has nothing to compare or to send.
        if group.size == 1:
            return self.body(AgreedEngine(job, group), *inputs)
        is_eager = tf.executing_eagerly()
        if is_eager:
            # In a graph, each transfer checks when it starts.
            job.health.check(group.name, group.ranks)
        else:
            call = replace(call, in_function=True)
            require_order(f"rank {job.cluster.rank}: {call.collective} was called at {call.line}")
        if group.tag is not None:
            # Each tag keeps its own order, whichever threads send and receive.
            call = replace(call, thread="")
        # A thread that calls for the first time exchanges numbers with the other ranks.
        exchange = partial(_exchange, job, group, call, not is_eager)
        in_call: Any = contextlib.nullcontext(False)
        if is_eager:
            in_call = job.threads.in_call(group, exchange)
        with in_call as overlaps:
            terms = self._terms(job, call, overlaps, exchange)
            route = route_of(job, group, self.values, self.is_ragged, self.has_owners)
            engine = AgreedEngine(job, group, terms, route)
            if route is Route.BEFORE_DATA:
                # A message of its own comes before the data, which may have any size.
                with tf.control_dependencies(engine.compare()):
                    return self.body(engine, *inputs)
            try:
                results = self.body(engine, *inputs)
                if not engine.terms.agreed:
                    # A body that had nothing to send, such as a list without gradients, has compared nothing.
                    engine.compare()
                return results
            finally:
                # The terms refer to the graph, which what the body has made may outlive.
                engine.terms = engine.terms.of_later_transfers()

    def _body_inputs(self) -> Sequence:
        if self.inputs is None:
            return self.values
        return self.inputs

    def _terms(self, job: Job, call: Call, overlaps: bool, exchange: Exchange) -> Terms:
        """Return what the ranks compare; ``overlaps``: another thread of this rank is in a call of the group."""
        group = self.group
        is_eager = tf.executing_eagerly()

        def error_for_mismatch(position: int) -> Exception:
            are_several = overlaps or (not is_eager and job.threads.are_several(group))
            row = {**call.row(), "overlaps": are_several}
            error, in_function = mismatch(job.cluster, job.control, group, row, position)
            if in_function:
                # All ranks stop, since the rest of the graph may already have started other collectives.
                job.health.stop(f"{type(error).__name__}: {error}")
            return error

        digest, dynamic = shapes_digest(call, self.values, self.is_ragged)
        if not is_eager and group.tag is None:
            # 0 for the main thread, on each rank another one to refuse.
            dynamic.append(job.threads.number_at_each_call(group, exchange))
        terms = Terms(call.fingerprint, wrapped(digest), call.row, overlaps, error_for_mismatch)
        if len(dynamic) > 1:
            dynamic = [tf.add_n(dynamic)]
        for dynamic_digest in dynamic:
            terms = terms._replace(dynamic_digest=dynamic_digest)
        return terms

    def _add_to_session(self, job: Job, call: Call) -> Any:
        """Add the call to the graph of a session; return its results, or the operation itself if there are none."""
        arguments = list(self._body_inputs())
        inputs = tf.nest.map_structure(tf.convert_to_tensor, arguments, expand_composites=True)
        structure = tf.TensorSpec([], tf.int32)
        if self.result_specs is not None:
            structure = self.result_specs()

        def run(*arrays: tf.Tensor) -> list[tf.Tensor]:
            values = tf.nest.pack_sequence_as(inputs, arrays, expand_composites=True)
            compared = self.values
            # With owners, the values are specs, and only the inputs are tensors of this rank.
            if not self.has_owners:
                # A receive has no inputs, and compares the spec of what it expects.
                compared = values[: len(self.values)] or self.values
            results = replace(self, values=compared, inputs=values).run(job, call)
            if self.result_specs is None:
                return [tf.constant(0)]
            return tf.nest.flatten(results, True)

        def gradient(*upstream: tf.Tensor) -> Sequence[tf.Tensor]:
            if self.gradient is None:
                raise LookupError(
                    f"{self.name} has no gradient in the graph of a session, as on Ascend"
                )
            return self.gradient(upstream)

        specs = tf.nest.flatten(structure, True)
        flat_inputs = tf.nest.flatten(inputs, True)
        from_first = partial(_from_first, job)
        results = job.sessions.add(self.group, call, flat_inputs, specs, run, from_first)
        results = differentiable(results, gradient, flat_inputs)
        if self.result_specs is None:
            return results[0].op
        return tf.nest.pack_sequence_as(structure, results, expand_composites=True)


def _from_first(job: Job, group: Group, call: Call, tensor: tf.Tensor) -> tf.Tensor:
    """Send the tensor of the first rank of a group: the order in which its sessions' collectives run."""

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> list[tf.Tensor]:
        return engine.broadcast([tensor], [0])

    [sent] = Collective(call.collective, group, [tensor], body).run(job, call)
    return sent


def _exchange(
    job: Job, group: Group, call: Call, in_function: bool, numbers: Sequence[int]
) -> list[list[int]]:
    """Gather a row of numbers from each rank, about the thread that makes a call for the first time."""
    details = (*call.details, ("first_of_thread", "True"))
    call = replace(call, details=details, thread=calling_thread())
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            row = tf.constant([numbers], tf.int64)
            first = Collective("first_of_thread", group, [], AgreedEngine.gather, [row])
            rows = first.run(job, call)
    except PeerError as error:
        if not in_function:
            raise
        # The error has the type that TensorFlow gives to errors of the function itself.
        text = f"{type(error).__name__}: {error}"
        raise tf.errors.UnknownError(None, None, text) from error
    return [[int(number) for number in row] for row in rows.numpy()]


def _require_no_xla(job: Job, call: Call) -> None:
    if not tf.executing_eagerly() and compat.compiled_by_xla():
        raise RuntimeError(
            f"rank {job.cluster.rank}: {call.collective} was called at {call.line} in a function that XLA compiles "
            "(jit_compile=True), where a rank can't wait for the others.\n"
            "What to do: leave jit_compile out of tf.function; pass jit_compile=False to model.compile (on a GPU, "
            "Keras 3 turns XLA on by itself); or use npu.distribute.replicate(model), which keeps collectives out of "
            "XLA."
        )
