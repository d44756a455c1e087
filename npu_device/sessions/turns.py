"""In which order the collectives of a session's graph run: the same on all ranks.

Operations of a graph that don't depend on each other run in any order, another one on each rank, and which of them a
``session.run`` needs is known to nobody before. Each collective therefore queues when its inputs are there; a thread
lets them run one after the other in the order in which they came on the group's first rank, which tells the others. All
that waits at one time is told at once.

The thread runs eagerly: TensorFlow's sessions are local, and their operations can't see other ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.agreement import Call, agreed
from npu_device.collectives.broadcast import broadcast
from npu_device.collectives.group import Group

_TOLD_AT_ONCE = 64
_NOTHING = -1
_CHECK_SECONDS = 0.5


class _Waiting:
    """One execution of a collective that waits for its turn."""

    def __init__(self, call: Call, function: Callable[[], Sequence[tf.Tensor]]) -> None:
        self.line = call.line
        self.result: Future[list[np.ndarray]] = Future()
        self._function = function

    def run(self) -> None:
        try:
            self.result.set_result([tensor.numpy() for tensor in self._function()])
        except BaseException as error:
            self.result.set_exception(error)


class Turns:
    """The queue of one group in one of its members."""

    def __init__(self, runtime: Runtime, group: Group) -> None:
        self._runtime = runtime
        self._group = group
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[_Waiting]] = {}
        threading.Thread(target=self._run, name=f"npu_device-session-{group.name}", daemon=True).start()

    def take(self, number: int, call: Call, function: Callable[[], Sequence[tf.Tensor]]) -> list[np.ndarray]:
        """Wait for the turn of a collective, and run it.

        Args:
            number: which collective of the graph it is; the same on all ranks.
            call: its description.
            function: called without arguments, eagerly, in another thread.

        Returns:
            What the function returns, as numpy arrays.

        Raises:
            Exception: what the function raises, or what kept the ranks from finding an order.
        """
        waiting = _Waiting(call, function)
        with self._changed:
            self._waiting.setdefault(number, deque()).append(waiting)
            self._changed.notify_all()
        return waiting.result.result()

    def _run(self) -> None:
        with _compat.eager_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                try:
                    for number in self._order():
                        self._next(number).run()
                except Exception as error:
                    self._refuse(error)

    def _order(self) -> list[int]:
        """The numbers that wait on the group's first rank."""
        with self._changed:
            numbers = list(self._waiting)[:_TOLD_AT_ONCE]
            line = self._waiting[numbers[0]][0].line
        if self._group.size == 1:
            return numbers
        mine = np.full([_TOLD_AT_ONCE], _NOTHING, np.int32)
        mine[: len(numbers)] = numbers
        call = Call("session.run", (), (), (), (), line)
        with agreed(self._runtime, self._group, call, []):
            [told] = broadcast(self._runtime, [tf.constant(mine)], 0, self._group)
        return [int(number) for number in told.numpy() if number != _NOTHING]

    def _next(self, number: int) -> _Waiting:
        """The oldest that waits under a number, as soon as there is one."""
        with self._changed:
            while number not in self._waiting:
                if not self._changed.wait(_CHECK_SECONDS):
                    self._runtime.health.check(self._group.name, self._group.ranks)
            queue = self._waiting[number]
            first = queue.popleft()
            if not queue:
                del self._waiting[number]
            return first

    def _refuse(self, error: Exception) -> None:
        """Give everything that waits an error."""
        with self._changed:
            queues = list(self._waiting.values())
            self._waiting.clear()
        for queue in queues:
            for waiting in queue:
                waiting.result.set_exception(error)


_turns: weakref.WeakKeyDictionary[Runtime, dict[Group, Turns]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def turns_of(runtime: Runtime, group: Group) -> Turns:
    """The queue of a group, with its thread; made at the first use."""
    with _lock:
        turns = _turns.setdefault(runtime, {})
        if group not in turns:
            turns[group] = Turns(runtime, group)
        return turns[group]
