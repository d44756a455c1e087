"""The running trace of this process. A step in a ``tf.function`` puts its points into a TensorFlow queue, which runs no
Python in the step; a thread of this process takes them out and records them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import runs_if_fetched
from npu_device._src.collectives.job import Job, current
from npu_device._src.trace import clock
from npu_device._src.trace.recorder import PointSchema, Recorder
from npu_device._src.trace.records import FILE, RankTrace
from npu_device._src.trace.settings import Settings

_WAITING = 10_000  # iterations that the queue holds; a step would wait when it is full

_log = logging.getLogger("npu_device")


class Tracer:
    """Takes the points of the iterations of this rank."""

    def __init__(self, job: Job, settings: Settings) -> None:
        cluster = job.cluster
        offset = clock.measure(job)
        head = RankTrace(
            rank=cluster.rank,
            world_size=cluster.world_size,
            host=cluster.host,
            pid=os.getpid(),
            clock_offset_us=offset.offset_us,
            clock_error_us=offset.error_us,
            model="",
            backend="",
            group="",
            gradients=(),
            segments=(),
        )
        self.rank = cluster.rank
        self.settings = settings
        self._recorder = Recorder(settings.output, head, settings.schedule)
        if cluster.rank == 0:
            _remove_others(settings.output, cluster.world_size)
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
        if runs_if_fetched():  # it can't use the eager runtime's queue
            return tf.numpy_function(lambda values: self._recorder.add(schema, values.tolist()), [together], [])
        self._schemas.append(schema)
        number = tf.constant(len(self._schemas) - 1)
        compat.run_independently(tf.raw_ops.QueueEnqueueV2(handle=self._queue.queue_ref, components=[number, together]))
        return None

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


def _remove_others(directory: Path, world_size: int) -> None:
    """Remove files that an earlier job with more ranks left in the directory."""
    for path in directory.glob(f"rank*/{FILE}"):
        if path.parent.name[4:].isdecimal() and int(path.parent.name[4:]) >= world_size:
            path.unlink(missing_ok=True)


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
