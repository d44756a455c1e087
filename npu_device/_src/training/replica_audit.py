"""The replica audit: every so many steps the ranks compare digests of what an optimizer trains, and of its own state;
or of the variables whose gradients a ``tf.function`` reduces itself.

The graph of a step counts, and does nothing else until an audit is due. The audit itself runs in Python. What the ranks
send each other are collectives of the graph, so that they keep their place among the step's other collectives. An audit
that finds a difference goes on to find out how large it is (``drift``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.graph import call_now, step_data
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.ops import all_reduce
from npu_device._src.training.drift import Drift
from npu_device._src.training.same_variables import (
    can_compare,
    compared,
    digest_of,
    warn_if_different,
)
from npu_device._src.training.training_state import unique
from npu_device._src.training.world import World

_FIRST = 10  # steps to the first audit, and to the second, from which the time of a step is known
_SHARE = 0.0005  # of the time, so that audits that take twice as long as expected cost less than 0.1 %
_LARGEST = 1 << 62
_END_SECONDS = 3.0


_numbers = itertools.count()
_audits: weakref.WeakValueDictionary[int, Audit] = weakref.WeakValueDictionary()  # those of all ranks of the job
_BY_HAND = "_npu_device_audits"  # an attribute of the first variable: by the ids of all


class Audit:
    """The audits of one optimizer.

    Args:
        world: the ranks.
        optimizer: the optimizer; None if it isn't known.
        at_once: the first step is audited, because the ranks couldn't compare the variables before it.

    Attributes:
        world: the ranks.
        variables: those that the last step updated.
    """

    def __init__(self, world: World, optimizer: Any, at_once: bool) -> None:
        self.world = world
        self._optimizer = optimizer
        every = environment.NPU_DEVICE_AUDIT.get()
        self._every = None if every == "auto" else int(every)
        first = 1 if at_once else self._every or _FIRST
        self._count, self._due = 0, first  # of steps in eager mode
        self._device = world.runtime.device("CPU")
        with tf.init_scope(), tf.device(self._device):
            self._graph_count = compat.plain_variable(tf.constant(0, tf.int64))
            self._graph_due = compat.plain_variable(tf.constant(first, tf.int64))
        self._drift = Drift(world)
        self._began = self._audit_seconds = self._step_seconds = 0.0
        self._last: tuple[int, float] | None = None  # steps and time at the previous audit
        self.variables: Sequence[Any] = ()
        if warn_if_ended_apart not in world.runtime.before_leaving:
            world.runtime.before_leaving.append(warn_if_ended_apart)
        if world.size == world.runtime.cluster.world_size:
            _audits[next(_numbers)] = self

    @contextlib.contextmanager
    def step(self, variables: Sequence[Any]) -> Iterator[None]:
        """Audit the variables if it is time; updates in the block come after that.

        Args:
            variables: those that this step updates, in the same order on every rank.
        """
        self.variables = variables
        if tf.executing_eagerly():
            self._count += 1
            if self._count >= self._due:
                self._due = int(self._compare(variables, np.int64(self._count)))
            yield
            return
        audited = self._in_graph(variables)
        with tf.control_dependencies([audited]):
            yield

    def _in_graph(self, variables: Sequence[Any]) -> Any:
        """Return an operation that audits when it is time."""
        written = _writes([*variables, *self._own(variables)])
        # A step that ends for lack of data must count on no rank.
        with tf.device(self._device), tf.control_dependencies([*step_data(), *written]):
            count = tf.raw_ops.ResourceCountUpTo(resource=self._graph_count.handle, limit=_LARGEST, T=tf.int64) + 1

        def audit() -> tf.Tensor:
            due = self._compare(variables, count)
            self._graph_due.assign(due, read_value=False)
            return due

        with tf.device(self._device):
            return tf.cond(count >= self._graph_due, audit, lambda: tf.constant(0, tf.int64)).op

    def _compare(self, variables: Sequence[Any], count: Any) -> Any:
        """Compare digests; return the number of steps after which the next audit is due."""
        myself = weakref.ref(self)  # the optimizer leads to a replicated model, and that to the graph

        def look(count: Any) -> list[Any]:
            return [_alive(myself)._look(variables, int(count))]

        def settle(most: Any, count: Any) -> list[Any]:
            return _alive(myself)._settle(most, int(count))

        [mine] = call_now(look, [count], [tf.TensorSpec([4], tf.int64)])
        most = all_reduce(self.world.runtime, mine, "max", self.world.group)
        equal, due = call_now(settle, [most, count], [tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int64)])
        return tf.cond(equal, lambda: tf.identity(due), lambda: self._drift.report(due))

    def _look(self, variables: Sequence[Any], count: int) -> Any:
        """Return this rank's digest, negated too, and minus its times: the ranks take the maxima."""
        began = time.perf_counter()
        with compat.eager_mode():
            audited = [*variables, *self._own(variables)]
            digests = [digest_of(variable) for variable in audited]
            made = count - 1 if self._optimizer is None else int(tf.convert_to_tensor(self._optimizer.iterations))
        self._drift.note(audited, digests, made)
        if self._last is not None:
            self._step_seconds = (began - self._last[1]) / max(1, count - self._last[0])
        self._last, self._began = (count, began), began
        looked = time.perf_counter() - began
        digest = self.checksum(digests)
        # Those who wait for the last rank don't work: the shortest of the ranks' audits is what one costs.
        cost = max(looked, self._audit_seconds)
        return np.array([digest, -digest, -cost * 1e9, -self._step_seconds * 1e9], np.int64)

    def _settle(self, most: Any, count: int) -> list[Any]:
        """Return whether the digests are equal, and after how many steps to compare them again."""
        self._audit_seconds = time.perf_counter() - self._began
        digest, negated, cost, step = (int(number) for number in most)
        equal = digest == -negated
        if equal:
            self._drift.equal()
        interval = self._every
        if interval is None:
            interval = max(_FIRST, math.ceil(cost / step / _SHARE)) if step else _FIRST
        return [np.bool_(equal), np.int64(count + interval)]

    def checksum(self, digests: list[Any]) -> int:
        """Return a checksum of the digests; without an optimizer, the ranks' variables may be in another order."""
        return zlib.crc32(repr(sorted(digests) if self._optimizer is None else digests).encode())

    def _own(self, variables: Sequence[Any]) -> list[Any]:
        """Return the optimizer's own variables that exist now."""
        if self._optimizer is None:
            return []
        known = {id(variable) for variable in variables}
        own = unique(compat.optimizer_variables(self._optimizer, variables))
        return [variable for variable in own if id(variable) not in known]


def step_behind(world: World, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Audit the variables whose gradients a ``tf.function`` is about to reduce, if it is time.

    Args:
        world: the ranks.
        variables: from ``same_variables.make_equal_behind``; none if they aren't known.

    Returns:
        A context manager; reductions in its block come after the audit.
    """
    if not variables or world.size == 1 or not can_compare() or environment.NPU_DEVICE_AUDIT.get() == "off":
        return contextlib.nullcontext()
    # Functions that are made again go on with the same count. So the audit must live as long as the variables: a
    # function that nobody refers to is gone when Python's garbage collector has run, on each rank at another time.
    audits = vars(variables[0]).setdefault(_BY_HAND, {})
    key = tuple(map(id, variables))
    if key not in audits:
        audits[key] = Audit(world, None, not compared(variables))
    audit: Audit = audits[key]
    return audit.step(variables)


def _alive(reference: weakref.ref[Audit]) -> Audit:
    audit = reference()
    if audit is None:
        raise RuntimeError(
            "a function makes a step with an optimizer that no longer exists.\nWhat to do: keep a reference to the "
            "optimizer."
        )
    return audit


def warn_if_ended_apart(runtime: Job) -> None:
    """Compare what audited optimizers have trained at the end of the job; rank 0 warns with the names of what differs.

    After a failure nothing is compared, and ranks that end much later than others are not waited for.
    """
    if runtime.health.is_over:
        return
    with compat.eager_mode(), contextlib.suppress(ClusterError, TimeoutError, tf.errors.OpError):
        audits = {str(number): audit for number, audit in sorted(_audits.items())}
        mine = {
            number: audit.checksum([digest_of(variable) for variable in audit.variables])
            for number, audit in audits.items()
        }
        everybody = runtime.store.gather("digest at the end", mine, _END_SECONDS)
        # An optimizer that nobody refers to any more may be gone on some ranks only.
        common = [number for number in audits if all(number in digests for digests in everybody)]
        if any(digests[number] != mine[number] for number in common for digests in everybody):
            gather = functools.partial(runtime.store.gather, "digests at the end", timeout=_END_SECONDS)
            variables = [variable for number in common for variable in audits[number].variables]
            warn_if_different(audits[common[0]].world, variables, gather)


def _writes(variables: Sequence[Any]) -> list[tf.Operation]:
    """Return the operations of the graph that is built now which may have changed one of some variables."""
    graph = tf.compat.v1.get_default_graph()
    handles = {id(compat.handle_of(variable)) for variable in variables}
    names = {inside.name for outside, inside in graph.captures if id(_outermost(outside)) in handles}
    return [
        operation
        for operation in graph.get_operations()
        if operation.op_def.is_stateful
        and not operation.type.startswith("Read")
        and any(tensor.name in names for tensor in operation.inputs)
    ]


def _outermost(tensor: Any) -> Any:
    """Return what a graph gets from outside as an input; any other tensor itself."""
    while tf.is_symbolic_tensor(tensor):
        captures = getattr(tensor.graph, "captures", ())
        outer = next((outside for outside, inside in captures if inside is tensor), None)
        if outer is None:
            break
        tensor = outer
    return tensor
