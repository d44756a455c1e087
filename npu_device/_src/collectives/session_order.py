"""Run a session's collectives in the same order on all ranks.

Operations of a graph that don't depend on each other run in any order, different on each rank, and which of them a
``session.run`` needs isn't known in advance. So each collective queues when its inputs are ready. A thread
runs them one by one in the order in which they came on the group's first rank, which sends that order to the
others. The first rank sends everything that is waiting at once. Calls with the same key that wait on all ranks are
joined: they run as one.

The thread runs eagerly: TensorFlow's sessions are local, and their operations can't see other ranks.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.agreement import Call, agreed
from npu_device._src.collectives.calling_thread import calling_thread
from npu_device._src.collectives.choice import carries, through_reducing_backend
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_SENT_AT_ONCE = 64
_NOTHING = -1
_ALONE = 0
_LARGEST_KEY = (1 << 31) - 1
_CHECK_SECONDS = 0.5

_Function = Callable[..., Sequence[tf.Tensor]]


class _Queued:
    """One queued execution of a collective."""

    def __init__(self, call: Call, values: Sequence[np.ndarray], function: _Function, key: str | None) -> None:
        self.call = call
        self.values = values
        self.function = function
        self.key = _ALONE if key is None else 1 + zlib.crc32(key.encode()) % _LARGEST_KEY
        self.result: Future[list[np.ndarray]] = Future()


def _run_joined(queued: Sequence[_Queued]) -> None:
    """Run several as one; each value then has one result."""
    try:
        values = [tf.convert_to_tensor(value) for one in queued for value in one.values]
        results = [tensor.numpy() for tensor in queued[0].function(*values)]
    except BaseException as error:
        for one in queued:
            one.result.set_exception(error)
        return
    for one in queued[:-1]:
        one.result.set_result(results[: len(one.values)])
        del results[: len(one.values)]
    queued[-1].result.set_result(results)


class SessionOrder:
    """The queue of one group on one of its members."""

    def __init__(self, job: Job, group: Group) -> None:
        self._job = job
        self._group = group
        self._changed = threading.Condition()
        self._closed = False
        self._queues: dict[int, deque[_Queued]] = {}
        threading.Thread(target=self._run, name=f"npu_device-session-{group.name}", daemon=True).start()

    def run(
        self, number: int, call: Call, values: Sequence[np.ndarray], function: _Function, key: str | None
    ) -> list[np.ndarray]:
        """Run a collective when its turn comes.

        Args:
            number: number of the collective in the graph; the same on all ranks.
            call: its description.
            values: the function's arguments, as tensors.
            function: called eagerly, in another thread.
            key: calls with the same key may be joined: one function is called with the values of all, and returns one
                result for each value. None for a call that runs alone.

        Returns:
            The function's results for these values, as numpy arrays.

        Raises:
            Exception: raised by the function, or the reason why the ranks found no order.
        """
        queued = _Queued(call, values, function, key)
        with self._changed:
            if self._closed:
                raise RuntimeError(f"group {self._group.name!r} was destroyed on this rank")
            self._queues.setdefault(number, deque()).append(queued)
            self._changed.notify_all()
        return queued.result.result()

    def close(self) -> None:
        """End the thread; later calls fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        with compat.eager_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queues or self._closed)
                if self._closed:
                    self._refuse(RuntimeError(f"group {self._group.name!r} was destroyed on this rank"))
                    return
                try:
                    for numbers in self._order():
                        _run_joined([self._next(number) for number in numbers])
                except Exception as error:
                    self._refuse(error)

    def _order(self) -> list[list[int]]:
        """Return the numbers that wait on the group's first rank; the numbers in one list are joined."""
        with self._changed:
            first = {number: queue[0] for number, queue in list(self._queues.items())[:_SENT_AT_ONCE]}
        if self._group.size == 1:
            return [[number] for number in first]
        mine = np.full([2, _SENT_AT_ONCE], _NOTHING, np.int32)
        mine[:, : len(first)] = [list(first), [queued.key for queued in first.values()]]
        values = tf.constant(mine)
        call = Call("session.run", (), (), (), (), next(iter(first.values())).call.line, calling_thread())
        with agreed(self._job, self._group, call, [], carries(self._job, self._group, [values])) as agreement:
            [sent] = through_reducing_backend(
                agreement, self._group, tf.int32, lambda backend, now: backend.broadcast(now, [values], 0, self._group)
            )
        numbers, keys = sent.numpy()[:, sent.numpy()[0] != _NOTHING].tolist()
        if len(set(keys) - {_ALONE}) < len(keys) - keys.count(_ALONE):
            keys = self._waits_everywhere(numbers, call) * keys
        order: dict[tuple[int, int], list[int]] = {}
        for number, key in zip(numbers, keys):
            order.setdefault((key, number if key == _ALONE else 0), []).append(number)
        return list(order.values())

    def _waits_everywhere(self, numbers: Sequence[int], call: Call) -> np.ndarray:
        """Return 1 for each number that waits on all ranks at this moment, 0 for the others."""
        with self._changed:
            here = tf.constant([int(number in self._queues) for number in numbers], tf.int32)
        with agreed(self._job, self._group, call, [], carries(self._job, self._group, [here])) as agreement:
            [[least]] = through_reducing_backend(
                agreement,
                self._group,
                tf.int32,
                lambda backend, now: backend.all_reduce(now, [[here]], "min", self._group, None),
            )
            return least.numpy()

    def _next(self, number: int) -> _Queued:
        """Return the oldest entry that waits under a number, as soon as there is one."""
        with self._changed, self._job.stall_watch.hold(self._group) as held:
            while number not in self._queues:
                if not self._changed.wait(_CHECK_SECONDS):
                    self._job.health.check(self._group.name, self._group.ranks)
                # If anything else waits, a session.run waits here; if not, the rank is busy elsewhere.
                held.call = next((queue[0].call.row() for queue in self._queues.values()), None)
            queue = self._queues[number]
            first = queue.popleft()
            if not queue:
                del self._queues[number]
            return first

    def _refuse(self, error: Exception) -> None:
        """Fail everything that waits with an error."""
        with self._changed:
            queues = list(self._queues.values())
            self._queues.clear()
        for queue in queues:
            for queued in queue:
                queued.result.set_exception(error)


def order_of(job: Job, group: Group) -> SessionOrder:
    """Return the order of a group, with its thread, made at the first use."""
    with job.making:
        if group not in job.session_orders:
            job.session_orders[group] = SessionOrder(job, group)
        return job.session_orders[group]


def close_orders(job: Job, name: str) -> None:
    """End the order of a group that is destroyed, and those of groups made for its operations."""
    with job.making:
        orders = job.session_orders
        closed = [orders.pop(group) for group in list(orders) if name in (group.name, group.parent)]
    for order in closed:
        order.close()
