"""The job as this rank sees it: one object that owns all its state, from the rendezvous until this process leaves.

A process joins one job at most. ``current`` is that job. Whatever belongs to a job is an attribute of it, or one of its
components, which higher floors add; nothing else holds state of a job, so that all of it ends with the job.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
from typing import Any, Callable, TypeVar, cast

from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.collectives.calling_threads import CallingThreads
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.engines import Engines
from npu_device._src.collectives.group import WORLD_GROUP, Group, find_group
from npu_device._src.collectives.sessions import SessionCollectives
from npu_device._src.collectives.stall import StallWatch

_Component = TypeVar("_Component")

NEW_PROCESS = (
    "What to do if a cluster starts one job after another: let it start new processes for each. With Spark, set "
    "spark.python.worker.reuse=false."
)

_log = logging.getLogger("npu_device")


class Job(EngineContext):
    """All state of a job on one of its ranks.

    Attributes:
        serves_others: the others need this process until they have finished, because the hub is its child; it waits for
            them at its end.
        has_communicated: this rank has called a collective other than a barrier, or built a graph with one.
        has_advised_bits: this rank has come to where rank 0 recommends other bits than those of float16.
        before_leaving: called with the job before this process leaves it; not in a forked child.
        groups: made by the script of this rank, by name.
        why_no_mpi: why MPI isn't used although its launcher started the ranks; "" if there is nothing to say.
        threads: the threads of this rank that call collectives.
        sessions: the collectives in graphs that sessions run.
    """

    stall_watch: StallWatch

    def __init__(
        self, cluster: Cluster, channel: ControlChannel, serves_others: bool, secret: bytes
    ) -> None:
        super().__init__(cluster, channel, secret)
        self.serves_others = serves_others
        self.has_communicated = False
        self.reductions = 0  # what this rank has reduced, each list counted once
        self.has_advised_bits = False
        self.before_leaving: list[Callable[[Job], None]] = []
        self.world_group = Group(WORLD_GROUP, tuple(range(cluster.world_size)), cluster.rank)
        self.groups: dict[str, Group] = {}
        self.why_no_mpi = ""
        self.engines = Engines(self)
        self.threads = CallingThreads()
        self.sessions = SessionCollectives(self.health)
        self._components: dict[Any, Any] = {}
        self.pid = os.getpid()

    @property
    def in_fork(self) -> bool:
        """Return True in a forked child, which must not leave the job at its exit."""
        return self.pid != os.getpid()

    def group(self, name: str) -> Group:
        """Return the group of a name; raise ValueError if this rank has none of that name."""
        if name == WORLD_GROUP:
            return self.world_group
        return find_group(name, self.cluster.rank, self.cluster.world_size, self.groups)

    def forget_group(self, name: str) -> None:
        """Free what is held for a group that is destroyed, and for the groups made for its operations."""
        # The group leaves the table first, so that nobody gets it while it is freed.
        del self.groups[name]
        self.sessions.forget(name)
        self.engines.forget(name)
        self.counts.forget(name)

    def add(self, component: Any) -> None:
        """Keep an object of a higher floor as long as the job; its ``close()``, if any, is called before this process
        leaves. A job has one component of a class.
        """
        self._components[type(component)] = component

    def end(self, component_type: type) -> None:
        """Close the component of a class now, if there is one."""
        close = getattr(self._components.pop(component_type, None), "close", None)
        if close is not None:
            close()

    def component(self, component_type: type[_Component]) -> _Component | None:
        return cast("_Component | None", self._components.get(component_type))

    def component_or_new(
        self, component_type: Callable[..., _Component], *arguments: object
    ) -> _Component:
        """Return the component of a class, which is made with these arguments at its first use."""
        if component_type not in self._components:
            self.add(component_type(*arguments))
        return cast(_Component, self._components[component_type])

    def finish(self) -> None:
        """Close the components, and let what this rank has sent arrive."""
        # Components end in reverse order, since a later one may use an earlier one.
        for component_type in reversed(list(self._components)):
            self.end(component_type)
        for callback in self.before_leaving:
            callback(self)
        # Delivered last, as closing the components may still send data.
        self.peers.deliver()

    def leave(self) -> None:
        """Tell the others that this rank has finished. The rank that they depend on waits for them."""
        self.health.leave(self.serves_others)
        self.peers.close()


_current: Job | None = None
_closed_by: int | None = None


def current() -> Job | None:
    """Return the job of this process; None before ``start`` and after ``close``."""
    return _current


def current_component(component_type: type[_Component]) -> _Component | None:
    """Return the component of a class; None without one, without a job, and in a forked child."""
    if _current is None or _current.in_fork:
        return None
    return _current.component(component_type)


def is_closed() -> bool:
    return _closed_by == os.getpid()


def require_unclosed() -> None:
    """Raise ClusterError if the job has been closed in this process."""
    if is_closed():
        raise ClusterError(
            "npu_device has been closed in this process, and a process can join its job only once.\n"
            "What to do in a script: call npu.close() only at its end, or not at all: it also runs at exit.\n"
            f"{NEW_PROCESS}"
        )


def start(
    cluster: Cluster, channel: ControlChannel, serves_others: bool, secret: bytes = b""
) -> Job:
    global _current
    _current = Job(cluster, channel, serves_others, secret)
    _current.health.start()
    # Python's exit closes the job if the script never calls ``close``.
    atexit.register(_exit, _current.at_exit)
    _log.info("rank %d of %d on host %s is ready", cluster.rank, cluster.world_size, cluster.host)
    return _current


def abandon(error: BaseException) -> PeerError | None:
    """Leave the job because of an error before the first collective, and tell the others. Return the error of another
    rank, if that was the cause.
    """
    global _current, _closed_by
    job = _current
    _current = None
    assert job is not None
    _closed_by = os.getpid()
    job.peers.close()
    return job.health.give_up(error)


def close() -> None:
    """Leave the job normally; also runs at exit. Does nothing without a job or in a forked child."""
    global _current, _closed_by
    job = _current
    if job is None or job.in_fork:
        # The connections of a job belong to the parent; a child must not close them.
        _current = None
        return
    try:
        job.finish()
    finally:
        _current = None
        _closed_by = os.getpid()
        job.leave()


def _exit(callbacks: list[Callable[[], None]]) -> None:
    close()
    # Keras leaves iterators over Python code to the garbage. When such an iterator is freed, it waits for its thread,
    # which never returns while Python shuts down.
    gc.collect()
    # The child of a fork inherits the list, and mustn't end what the parent still uses.
    if is_closed():
        for callback in callbacks:
            callback()
