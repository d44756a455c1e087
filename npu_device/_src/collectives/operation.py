"""The declaration of an operation: its argument checks, what the ranks agree on, and its results.

One declaration serves the three ways to run an operation. In eager mode and in a ``tf.function`` the ranks agree on the
call and the operation's function runs. In a graph for a session the call becomes an operation of that graph
(``session_graph``), which does the same eagerly when the graph runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, cast

import tensorflow as tf

from npu_device._src.collectives import session_graph
from npu_device._src.collectives.agreement import Call, agreed, describe
from npu_device._src.collectives.choice import carries
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.terms import Agreement

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    _Arguments = ParamSpec("_Arguments")

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Declaration:
    """One call of an operation, with checked arguments.

    Attributes:
        operation: name of the operation.
        group: the ranks that take part.
        values: the values that the ranks compare: dense tensors, their specs, ``tf.IndexedSlices`` and ``None``.
        results: returns the specs of the results, in the structure that the operation returns; None for an
            operation that returns nothing.
        same: whatever else must be the same on every rank.
        ragged: the first dimension of the values may differ among the ranks.
        gradient: in a session's graph, returns the gradients of the values for those of the results; None for an
            operation without gradients there.
        key: calls with the same key that wait at the same time in a session may run as one call with all their values,
            which returns one result for each value. None for an operation that runs alone.
    """

    operation: str
    group: Group
    values: Sequence[Any]
    results: Optional[Callable[[], Any]] = None
    same: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    gradient: Optional[Callable[[Job, Sequence[tf.Tensor]], Sequence[tf.Tensor]]] = None
    key: Optional[str] = None

    def call(self) -> Call:
        """Return the description on which the ranks agree."""
        return describe(self.operation, self.values, self.ragged, **self.same)


def collective(
    declare: Callable[..., Optional[Declaration]], *inputs: str
) -> Callable[[Callable[Concatenate[Agreement, _Arguments], _Result]], Callable[Concatenate[Job, _Arguments], _Result]]:
    """Make a function a collective operation: the ranks agree on each call before the function runs.

    Args:
        declare: takes the function's arguments except ``agreement``. It raises if they are wrong, and returns the
            declaration, or None for a call that has nothing to do on any rank.
        inputs: names of the parameters that are tensors, numbers, or nested lists of them.

    The function takes the agreement as its first argument, ``agreement``; callers pass the job there.
    Operations composed of others call the parts of these (``moving``, a backend), so that a call is one agreement.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)[1:]

        @functools.wraps(function)
        def call(job: Job, *args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args), **kwargs)
            declared = declare(**arguments)
            if declared is None:
                return function(Agreement(job), **arguments)
            way = place if session_graph.runs_if_fetched() else run
            return way(job, declared, declared.call(), arguments)

        def run(job: Job, declared: Declaration, described: Call, arguments: dict[str, Any]) -> Any:
            carried = carries(job, declared.group, declared.values, declared.ragged)
            with agreed(job, declared.group, described, declared.values, carried) as agreement:
                return function(agreement, **arguments)

        def place(job: Job, declared: Declaration, described: Call, arguments: dict[str, Any]) -> Any:
            given = {name: arguments[name] for name in inputs}
            given = tf.nest.map_structure(tf.convert_to_tensor, given, expand_composites=True)

            def eagerly(*values: tf.Tensor) -> Any:
                # Joined calls have one parameter, a list.
                joined = {inputs[0]: list(values)} if declared.key else None
                now = {**arguments, **(joined or tf.nest.pack_sequence_as(given, values, expand_composites=True))}
                return run(job, cast(Declaration, declare(**now)), described, now)

            return session_graph.place(job, declared, described, tf.nest.flatten(given, True), eagerly)

        return call

    return decorate
