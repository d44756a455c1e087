"""In which order the collectives of a session's graph run: the same on all ranks.

Operations of a graph that don't depend on each other run in any order, another one on each rank, and which of them a
``session.run`` needs is known to nobody before. Each collective therefore queues when its inputs are there; a thread
lets them run one after the other in the order in which they came on the group's first rank, which tells the others. All
that waits at one time is told at once, and what may run together and waits on all ranks does.

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
from npu_device.collectives.all_reduce import all_reduce
from npu_device.collectives.broadcast import broadcast
from npu_device.collectives.group import Group

_TOLD_AT_ONCE = 64
_NOTHING = -1
_CHECK_SECONDS = 0.5

ALONE = 0
"""For ``Turns.take``: runs by itself."""

_Values = Sequence[tf.Tensor]


class _Waiting:
    """One execution of a collective that waits for its turn."""

    def __init__(
        self, call: Call, values: Sequence[np.ndarray], function: Callable[..., _Values], together: int
    ) -> None:
        self.line = call.line
        self.values = values
        self.function = function
        self.together = together
        self.result: Future[list[np.ndarray]] = Future()


def _run_together(waiting: Sequence[_Waiting]) -> None:
    """Run some as one; if they are several, each value has one result."""
    try:
        values = [tf.convert_to_tensor(value) for one in waiting for value in one.values]
        results = [tensor.numpy() for tensor in waiting[0].function(*values)]
    except BaseException as error:
        for one in waiting:
            one.result.set_exception(error)
        return
    for one in waiting[:-1]:
        one.result.set_result(results[: len(one.values)])
        del results[: len(one.values)]
    waiting[-1].result.set_result(results)


class Turns:
    """The queue of one group in one of its members."""

    def __init__(self, runtime: Runtime, group: Group) -> None:
        self._runtime = runtime
        self._group = group
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[_Waiting]] = {}
        threading.Thread(target=self._run, name=f"npu_device-session-{group.name}", daemon=True).start()

    def take(
        self,
        number: int,
        call: Call,
        values: Sequence[np.ndarray],
        function: Callable[..., _Values],
        together: int = ALONE,
    ) -> list[np.ndarray]:
        """Wait for the turn of a collective, and run it.

        Args:
            number: which collective of the graph it is; the same on all ranks.
            call: its description.
            values: what the function is called with, as tensors.
            function: called eagerly, in another thread.
            together: a number from 1, the same for collectives of which one function may be called with the values of
                several, and then gives one result for each value.

        Returns:
            What the function returns for these values, as numpy arrays.

        Raises:
            Exception: what the function raises, or what kept the ranks from finding an order.
        """
        waiting = _Waiting(call, values, function, together)
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
                    for numbers in self._order():
                        _run_together([self._next(number) for number in numbers])
                except Exception as error:
                    self._refuse(error)

    def _order(self) -> list[list[int]]:
        """The numbers that wait on the group's first rank; those in a list run together."""
        with self._changed:
            first = {number: queue[0] for number, queue in list(self._waiting.items())[:_TOLD_AT_ONCE]}
        if self._group.size == 1:
            return [[number] for number in first]
        mine = np.full([2, _TOLD_AT_ONCE], _NOTHING, np.int32)
        mine[:, : len(first)] = [list(first), [waiting.together for waiting in first.values()]]
        call = Call("session.run", (), (), (), (), next(iter(first.values())).line)
        with agreed(self._runtime, self._group, call, []):
            [told] = broadcast(self._runtime, [tf.constant(mine)], 0, self._group)
        numbers, together = told.numpy()[:, told.numpy()[0] != _NOTHING].tolist()
        if len(set(together) - {ALONE}) < len(together) - together.count(ALONE):
            together = self._waits_everywhere(numbers, call) * together
        order: dict[tuple[int, int], list[int]] = {}
        for number, key in zip(numbers, together):
            order.setdefault((key, number if key == ALONE else 0), []).append(number)
        return list(order.values())

    def _waits_everywhere(self, numbers: Sequence[int], call: Call) -> np.ndarray:
        """1 for each number that waits on all ranks at this moment, 0 for the others."""
        with self._changed:
            here = np.array([number in self._waiting for number in numbers], np.int32)
        with agreed(self._runtime, self._group, call, []):
            return all_reduce(self._runtime, tf.constant(here), "min", self._group).numpy()

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
