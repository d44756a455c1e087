"""Collectives in a graph that a session of TensorFlow 1 runs. Only ``collective`` adds them, through the job.

A session is local: operations in its graph can't see the other ranks. A collective is therefore an operation that calls
Python, which runs the collective eagerly. Errors that need the data, and errors of other ranks, are errors of
``session.run``. Only sums and means of ``all_reduce`` have gradients, as on Ascend.

Operations of a graph that don't depend on each other run in any order, different on each rank, and which of them a
``session.run`` needs isn't known in advance. So each collective queues when its inputs are ready. A thread runs them
one by one in the order in which they came on the group's first rank, which sends that order to the others. The first
rank sends everything that is waiting at once.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.time_limits import QUEUE_CHECK_SECONDS
from npu_device._src.collectives.call import Call, MismatchError, Row
from npu_device._src.collectives.calling_threads import calling_thread
from npu_device._src.collectives.dtypes import Tensors
from npu_device._src.collectives.group import Group, GroupTable
from npu_device._src.threads import start_thread

_SENT_AT_ONCE = 64
_NOTHING = -1


FromFirst = Callable[[Group, Call, tf.Tensor], tf.Tensor]
"""Returns the tensor of the first rank of a group on every rank, as a collective that is described by the call."""


class SessionCollectives:
    """The collectives in this rank's session graphs.

    Attributes:
        held: by group, a call that can't begin yet, as another collective comes first; None if unknown.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self.held: dict[Group, Row | None] = {}
        self._queues = GroupTable[SessionQueue]()
        self._counts = weakref.WeakKeyDictionary[tf.Graph, Counter[Group]]()

    def add(
        self,
        group: Group,
        call: Call,
        inputs: Tensors,
        specs: Sequence[tf.TensorSpec],
        run: Callable[..., Tensors],
        from_first: FromFirst,
    ) -> list[tf.Tensor]:
        """Add a collective to the session's graph: ``run`` runs it eagerly, given the values of the inputs. Return its
        results, for each spec, at least one.
        """
        group = group.of_one_order()
        queue = self._queues.of(group, partial(SessionQueue, self._health, self.held, from_first))
        # The collective may be added in a branch, but counts for the graph of the session.
        with tf.init_scope():
            graph = tf.compat.v1.get_default_graph()
        counts = self._counts.setdefault(graph, Counter())
        counts[group] += 1
        # The position is the same on each rank, as scripts build the same graph.
        position = counts[group]

        def in_order(*arrays: np.ndarray) -> list[np.ndarray]:
            return queue.run(position, call, arrays, run)

        return call_python(in_order, inputs, specs)

    def forget(self, name: str) -> None:
        """End the queue of a group that is destroyed, and those of groups made for its calls."""
        for queue in self._queues.forget(name).values():
            queue.close()


# The order


class _Queued(NamedTuple):
    """One execution of a collective that waits for its turn."""

    call: Call
    values: Sequence[np.ndarray]
    function: Callable[..., Tensors]
    result: Future[list[np.ndarray]]

    def run(self) -> None:
        try:
            results = self.function(*map(tf.convert_to_tensor, self.values))
            self.result.set_result([tensor.numpy() for tensor in results])
        except BaseException as error:
            self.result.set_exception(error)


class SessionQueue:
    """The queue of one group on one of its members."""

    def __init__(
        self, health: Health, held: dict[Group, Row | None], from_first: FromFirst, group: Group
    ) -> None:
        self._group = group
        self._health = health
        self._held = held
        self._from_first = from_first
        self._changed = threading.Condition()
        self._is_closed = False
        # Executions whose inputs are ready, by the position of the collective in its graph.
        self._queues: dict[int, deque[_Queued]] = {}
        start_thread(f"npu_device-session-{group.name}", self._run)

    def run(
        self,
        position: int,
        call: Call,
        values: Sequence[np.ndarray],
        function: Callable[..., Tensors],
    ) -> list[np.ndarray]:
        """Run a collective when its turn comes, in another thread, and return its results."""
        queued = _Queued(call, values, function, Future())
        with self._changed:
            if self._is_closed:
                raise self._destroyed()
            # A session may run in several threads, so that several executions of one operation wait.
            self._queues.setdefault(position, deque()).append(queued)
            self._changed.notify_all()
        return queued.result.result()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        with compat.eager_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queues or self._is_closed)
                if self._is_closed:
                    self._refuse(self._destroyed())
                    return
                try:
                    # No lock is held here: while a collective runs, others are queued.
                    for position in self._order():
                        self._next(position).run()
                except Exception as error:
                    self._refuse(error)

    def _order(self) -> list[int]:
        """Return the positions that wait on the first rank of the group."""
        with self._changed:
            positions = list(self._queues)[:_SENT_AT_ONCE]
            line = self._queues[positions[0]][0].call.line
        if self._group.size == 1:
            return positions
        # All members send the same number of entries, since each has others in its queue.
        padded = tf.constant(positions + [_NOTHING] * (_SENT_AT_ONCE - len(positions)))
        call = Call("session.run", (), (), (), (), line, calling_thread())
        sent = self._from_first(self._group, call, padded)
        return [position for position in sent.numpy().tolist() if position != _NOTHING]

    def _next(self, position: int) -> _Queued:
        """Return the oldest entry that waits at a position, as soon as there is one."""
        held = self._held
        with self._changed:
            try:
                while position not in self._queues:
                    if self._is_closed:
                        raise self._destroyed()
                    if not self._changed.wait(QUEUE_CHECK_SECONDS):
                        self._health.check(self._group.name, self._group.ranks)
                    # If anything else waits, a session.run waits here; if not, the rank is busy elsewhere.
                    waiting = (queue[0].call.row() for queue in self._queues.values())
                    held[self._group] = next(waiting, None)
            finally:
                held.pop(self._group, None)
            queue = self._queues[position]
            execution = queue.popleft()
            if not queue:
                del self._queues[position]
            return execution

    def _destroyed(self) -> Exception:
        return RuntimeError(f"group {self._group.name!r} was destroyed on this rank")

    def _refuse(self, error: Exception) -> None:
        with self._changed:
            queues = list(self._queues.values())
            self._queues.clear()
        for queue in queues:
            for queued in queue:
                queued.result.set_exception(error)


# The operation that calls Python without holding one of the session's threads. ``tf.numpy_function`` alone keeps a
# thread of the session's pool while it waits. On a machine with few cores the pool has one or two, and two ranks that
# wait in different operations would never reach the one that the other waits for.


# TensorFlow makes any exception of a Python function an UnknownError (2.20, ``py_func.cc``), where calls that don't
# fit each other are a FailedPreconditionError. So is reading a path below a file, whose message has the path
# (``tracebacks`` takes it out again). Can go when TensorFlow keeps the code of an OpError.
_READABLE = "/dev/null"
_MOST_BYTES = 3500  # the longest text in a path: one above 4096 bytes is another error


def _shortened(text: str) -> str:
    """Return a text of at most ``_MOST_BYTES``: from the middle of a longer one, ranks are left out."""
    encoded = text.encode()
    # Cut in bytes, since a path is limited in bytes.
    if len(encoded) <= _MOST_BYTES:
        return text
    ends = (encoded[: _MOST_BYTES // 2], encoded[-_MOST_BYTES // 2 :])
    return "\n…\n".join(end.decode(errors="ignore") for end in ends)


@compat.do_not_convert
def call_python(
    function: Callable, tensors: Tensors, specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Add an operation to the graph that calls a Python function outside of the session's threads, with the values as
    numpy arrays. It returns an array for each spec, at least one. What it raises is an error of ``session.run``.
    """
    graph = tf.compat.v1.get_default_graph()
    dtypes = [spec.dtype for spec in specs]
    inputs = [tf.constant(0), *tensors]  # a dataset's element has at least one component

    def call(*values: np.ndarray) -> list:
        """Return a path to read before the results, and the results."""
        try:
            return [_READABLE, *function(*values)]
        except MismatchError as error:
            path = f"{_READABLE}/{type(error).__name__}: {_shortened(str(error))}\n"
            # A dtype has to come back for each result, whatever it holds.
            return [path.encode(), *(np.zeros(0, dtype.as_numpy_dtype) for dtype in dtypes)]

    def body(*components: tf.Tensor) -> Any:
        # TensorFlow 2.15 warns of a parameter named "_", which is no name of a node.
        path, *results = tf.numpy_function(call, list(components[1:]), [tf.string, *dtypes])
        # A read whose result is checked can't be dropped from the graph.
        tf.raw_ops.Assert(condition=tf.equal(tf.io.read_file(path), ""), data=[path])
        return results

    # Enter the graph again, so that TensorFlow finds it around the function. It would find eager mode if anything ran
    # before that was switched off, and place the function on the device of the job's task, which no session has
    # (``tf.numpy_function`` names the device of the eager context, TensorFlow 2.20). Can go when it names none in a
    # graph.
    outermost = graph
    while hasattr(outermost, "outer_graph"):
        outermost = outermost.outer_graph
    with outermost.as_default():
        signature = [tf.TensorSpec(None, tensor.dtype) for tensor in inputs]
        concrete = tf.function(body, autograph=False).get_concrete_function(*signature)
    concrete.add_to_graph(graph)
    # Reading the only element of a dataset is an asynchronous operation with its own thread, which also runs the
    # function of the dataset.
    dataset = tf.raw_ops.TensorDataset(
        components=inputs, output_shapes=[tensor.shape for tensor in inputs]
    )
    mapped = tf.raw_ops.MapDataset(
        input_dataset=dataset,
        other_arguments=[],
        f=tf.compat.as_str(concrete.name),
        output_types=dtypes,
        output_shapes=[None] * len(dtypes),
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
    )
    shapes = [spec.shape for spec in specs]
    return list(
        tf.raw_ops.DatasetToSingleElement(dataset=mapped, output_types=dtypes, output_shapes=shapes)
    )


class SessionSteps:
    """Counts the steps of each session that runs a graph, and calls Python in some of them.

    Args:
        name: a name in this process, by which each session finds a count of its own.
    """

    def __init__(self, name: str) -> None:
        self._sessions = itertools.count(1)
        # The state: number of the session from 1, steps that are over, and the number of steps before the next call.
        with tf.device("/device:CPU:0"):
            self._state = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[3], shared_name=f"npu_device {name}"
            )

    def call_when_due(
        self, function: Callable[..., int], inputs: Callable[[], Sequence[tf.Tensor]]
    ) -> tf.Tensor:
        """Return a tensor that is there when a function has been called, if it is time.

        It is called before the first step of a session, and after the number of steps that it returned. It takes the
        number of the session, the number of steps that are over, and the inputs as arrays.
        """

        def call(state: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            session, steps, _ = state.tolist()
            session = session or next(self._sessions)
            next_look = function(session, steps, *arrays)
            return [np.array([session, steps, next_look], np.int64)]

        def add_call() -> tf.Tensor:
            [state] = call_python(call, [earlier, *inputs()], [tf.TensorSpec([3], tf.int64)])
            with tf.control_dependencies(
                [tf.raw_ops.AssignVariableOp(resource=self._state, value=state)]
            ):
                return tf.identity(state)

        earlier = tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=self._state),
            lambda: tf.raw_ops.ReadVariableOp(resource=self._state, dtype=tf.int64),
            lambda: tf.zeros([3], tf.int64),
        )
        return tf.cond(earlier[1] >= earlier[2], add_call, lambda: tf.identity(earlier))

    def counted(self, looked: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        """Return a result of the step of that look, with which the step is over.

        A collective ends on all ranks or on none, so that they count alike: a step that lacks data doesn't count.
        """
        state = looked + tf.constant([0, 1, 0], tf.int64)
        with (
            tf.control_dependencies([result]),
            tf.device("/device:CPU:0"),
        ):
            written = tf.raw_ops.AssignVariableOp(resource=self._state, value=tf.identity(state))
        with tf.control_dependencies([written]):
            return tf.identity(result)
