"""The end of sessions of TensorFlow 1: are the variables that were made equal on all ranks still equal?

They are compared when a session ends through a hook or a call of this package; at the end of the job, in sessions that
are still open. ``session_steps`` compares them in between. A session that the script closes itself tells nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from npu_device._src import compat
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.job import Job, current_component
from npu_device._src.training.watching.digests import common_differences, variable_name
from npu_device._src.training.watching.last_word import checksums_in_time

_log = logging.getLogger("npu_device")

CAUSES = (
    "a rank that changed a variable alone (an assign, a hook, a restored checkpoint); gradients that were applied "
    "without a reduction; or a learning rate that is computed from the global step while the update changes it."
)
REMEDY = (
    "make the change on every rank, or run the operation npu_bridge.estimator.npu.npu_hook.broadcast_global_variables"
    "(0) after it; change the global step under tf.control_dependencies([learning_rate]). NPU_DEVICE_AUDIT=1 finds "
    "the step."
)
_ENDED_APART = (
    f"the ranks ended with different values for %s\nLikely cause: {CAUSES}\nWhat to do: {REMEDY}"
)

# The variables of a graph that are equal on all ranks, by the names of their operations.
_Variables = weakref.WeakValueDictionary[str, Any]


class SessionEnds:
    """The variables of session graphs that all ranks have made equal; a component of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._graphs = weakref.WeakKeyDictionary[Any, _Variables]()
        # The ranks build the same graphs in the same order, and so give them the same numbers.
        self._numbers = weakref.WeakKeyDictionary[Any, int]()
        self._next_number = itertools.count(1)

    def add(self, variables: Sequence) -> None:
        """Note variables of a graph that are equal on all ranks from now on."""
        for variable in map(compat.inner_variable, variables):
            graph = getattr(variable, "graph", None)
            if graph is None:
                continue
            if graph not in self._graphs:
                self._graphs[graph] = weakref.WeakValueDictionary()
                self._numbers[graph] = next(self._next_number)
            self._graphs[graph].setdefault(variable.op.name, variable)

    def compare(self, session: Any) -> None:
        """Compare the variables of a session that ends on all ranks; the last rank to come warns."""
        if session.graph in self._graphs and not self._job.health.is_over:
            self._post(session.graph, self._checksums(session))

    def close(self) -> None:
        """Compare the variables of sessions that are still open."""
        for graph in list(self._graphs):
            # Sessions that are closed, or in which no variable has a value, have no checksums.
            checksums_by_session = list(map(self._checksums, compat.open_sessions(graph)))
            usable_checksums = list(filter(None, checksums_by_session))
            # The ranks can't tell which of several sessions is which.
            if len(usable_checksums) == 1 and not self._job.health.is_over:
                self._post(graph, usable_checksums[0])

    def _checksums(self, session: Any) -> dict[str, int]:
        """Return the checksums of variables that must be equal, by their names."""

        def read(variable: Any) -> np.ndarray:
            return np.asarray(session.run(variable))

        variables = _to_be_equal(self._graphs[session.graph])
        return checksums_in_time(
            {variable_name(variable): variable for variable in variables}, read
        )

    def _post(self, graph: Any, checksums: dict[str, int]) -> None:
        job = self._job
        # Only what ranks have after the same number of collectives can be compared: one may end sessions alone.
        count = job.counts.of(job.world_group).started
        name = f"graph {self._numbers[graph]} of a session after {count} collectives"
        with contextlib.suppress(ClusterError):
            answers = job.control.post(name, checksums)
            # Only the last rank to post gets the answers of all.
            if answers:
                names = dict(zip(answers[0], answers[0]))
                # A rank that lacked time has read fewer variables.
                text = common_differences(job.cluster, names, answers)
                if text:
                    _log.warning(_ENDED_APART, text)


def _to_be_equal(noted: _Variables) -> Iterator:
    """Yield the trainable variables of a graph and their slots; others, as moving statistics, may differ."""
    # A variable lives as long as its graph, unless the script has taken it out.
    variables = dict(noted.items())
    trained = {name for name, variable in variables.items() if variable.trainable}
    for name, variable in variables.items():
        words = name.split("/")
        # TensorFlow names a slot after its variable: "net/weights/Momentum", perhaps within a scope.
        spans = itertools.combinations(range(len(words)), 2)
        inner_names = {"/".join(words[begin:end]) for begin, end in spans}
        if name in trained or inner_names & trained:
            yield variable


def compare_at_end(session: Any) -> None:
    """Compare the variables of a session that ends on all ranks, if there is a job."""
    ends = current_component(SessionEnds)
    if ends is not None:
        ends.compare(session)
