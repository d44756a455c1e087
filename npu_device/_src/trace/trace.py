"""The running trace of this process. A step in a ``tf.function`` puts its points into a TensorFlow queue, which runs no
Python in the step; a thread of this process takes them out and records them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.graph import fetchable_call
from npu_device._src.collectives.job import Job, current
from npu_device._src.trace.records import FILE, PointSchema, RankTrace, Recorder, Settings

_WAITING = 10_000  # iterations that the queue holds; a step would wait when it is full

_log = logging.getLogger("npu_device")


class Tracer:
    """Takes the points of the iterations of this rank."""

    def __init__(self, job: Job, settings: Settings) -> None:
        cluster = job.cluster
        head = RankTrace(cluster.rank, cluster.world_size, cluster.host, os.getpid(), *measure_clock(job))
        self.rank = cluster.rank
        self.settings = settings
        self._recorder = Recorder(settings.output, head, settings.schedule)
        for path in settings.output.glob(f"rank*/{FILE}") if cluster.rank == 0 else ():
            number = path.parent.name[4:]
            if number.isdecimal() and int(number) >= cluster.world_size:  # an earlier job had more ranks
                path.unlink(missing_ok=True)
        self._schemas: list[PointSchema] = []
        with compat.eager_mode():
            self._queue = tf.queue.FIFOQueue(_WAITING, [tf.int32, tf.float64])
        self._thread = threading.Thread(target=self._take, name="npu_device-trace", daemon=True)
        self._thread.start()

    def hand_over(self, schema: PointSchema, points: Sequence[Any]) -> tf.Operation | None:
        """Record an iteration: now, or whenever the graph runs. In a session, return the operation for it."""
        if tf.executing_eagerly():
            self._recorder.add(schema, points)
            return None
        together = tf.stack(points)
        fetched = fetchable_call(lambda values: self._recorder.add(schema, values.tolist()), together)
        if fetched is None:
            self._schemas.append(schema)
            components = [tf.constant(len(self._schemas) - 1), together]
            compat.run_independently(tf.raw_ops.QueueEnqueueV2(handle=self._queue.queue_ref, components=components))
        return fetched

    def close(self) -> None:
        """Record what has been handed over, and end. Functions that TensorFlow has traced meanwhile fail later."""
        with compat.eager_mode():
            self._queue.close()
        self._thread.join()
        self._recorder.close()

    def _take(self) -> None:
        with compat.eager_mode():
            while True:
                try:
                    number, points = self._queue.dequeue()
                except tf.errors.OpError:
                    return  # closed
                try:
                    self._recorder.add(self._schemas[int(number)], points.numpy().tolist())
                except Exception:  # training must not wait for a queue that nobody empties
                    _log.exception("rank %d: tracing ends here", self.rank)
                    self._recorder.close()


def running() -> Tracer | None:
    job = current()
    return None if job is None else job.part(Tracer)


def start(job: Job, settings: Settings) -> None:
    """Start a trace, which ends with the job. Every rank calls this; see ``Tracer``."""
    job.add(Tracer(job, settings))


def stop() -> None:
    job = current()
    if job is not None:
        job.end(Tracer)


_ROUNDS = 20


def measure_clock(job: Job) -> tuple[float, float | None]:
    """Compare clocks; return the correction of this one, the same on all ranks of a host, and its uncertainty (None if
    unknown), in microseconds. Every rank calls this.
    """
    cluster, timeout = job.cluster, environment.HCCL_CONNECT_TIMEOUT.get()
    first = cluster.neighbours[0]
    if first == 0:
        return 0.0, 0.0
    try:
        mine = min(_ask(job, number, timeout) for number in range(_ROUNDS)) if cluster.rank == first else None
        found = job.store.gather_from(f"clock of {cluster.host}", mine, cluster.neighbours, timeout).get(first)
        if found is None:
            raise TimeoutError(f"rank {first} hasn't compared them")
    except (ClusterError, TimeoutError) as error:
        _log.warning(
            "rank %d: the clocks of the hosts could not be compared (%s); times of different hosts don't belong "
            "together in the trace. What to do: turn the trace on for all ranks.",
            cluster.rank,
            error,
        )
        return 0.0, None
    took, offset = found
    return offset * 1e6, took / 2 * 1e6


def _ask(job: Job, number: int, timeout: float) -> tuple[float, float]:
    before = time.time()
    there = job.health.ask("clock", [job.cluster.rank, number], [0], timeout).get(0)
    after = time.time()
    if there is None:
        raise TimeoutError("rank 0 doesn't answer")
    return after - before, there - (before + after) / 2
