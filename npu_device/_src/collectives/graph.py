"""What collectives add to a graph: calls of Python, in order, after the data of the step, and with gradients.

A collective asks here which kind of graph is being built, and what follows from that. A ``tf.function`` runs its
operations whenever it is called; a session of TensorFlow 1 runs what it fetches (``sessions``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable, TypeVar

import numpy as np
import tensorflow as tf

from npu_device._src import compat

_Call = TypeVar("_Call")
_ids = itertools.count()

# The graph being built, of a session or of a ``tf.function``.


def runs_if_fetched() -> bool:
    """Return True while a graph for a session is built, also in its functions, branches and loops; False where
    operations run in any case, in eager mode and in a ``tf.function`` that eager code calls.
    """
    return not tf.compat.v1.executing_eagerly_outside_functions()


def require_order(call: str) -> None:
    """Raise RuntimeError if the graph being built runs several times at once; ``call`` names the call."""
    loop = compat.place_without_order()
    if loop is not None:
        raise RuntimeError(
            f"{call} in {loop}, where calls run in another order on each rank and would get each other's data.\n"
            "What to do: call it outside, before or after, on the whole batch instead of each element; give "
            "tape.jacobian the argument experimental_use_pfor=False."
        )


def after(operation: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose operations run after another one. Only a session's graph needs this."""
    if runs_if_fetched():
        return tf.control_dependencies([operation])
    return contextlib.nullcontext()


def at_once_in_session() -> contextlib.AbstractContextManager[Any]:
    """Return a context whose operations run at once, also while the graph of a session is built."""
    if runs_if_fetched():
        return compat.eager_mode()
    return contextlib.nullcontext()


def after_all(make: Callable[[], Any]) -> Any:
    """Return the tensors that ``make`` makes, after all operations with a state that it adds to the graph: of a branch
    and of the gradient of a function, TensorFlow may run only what is needed for results, and some transfers have none
    on this rank.
    """
    graph = tf.compat.v1.get_default_graph()
    count = len(graph.get_operations())
    tensors = make()
    operations = graph.get_operations()[count:]
    stateful = list(filter(compat.is_stateful, operations))
    with tf.control_dependencies(stateful):
        return tf.nest.map_structure(_copy, tensors)


def _copy(tensor: tf.Tensor | None) -> tf.Tensor | None:
    # A gradient that there isn't.
    if tensor is None:
        return None
    return tf.identity(tensor)


def fetchable(operations: Sequence) -> tf.Operation | None:
    """Return one operation for a session to fetch; None if operations run without being fetched."""
    if not runs_if_fetched():
        return None
    return tf.group(*operations)


def one_or_several(call: _Call, calls: list[_Call]) -> list[_Call]:
    """Return a list as one call, which starts with the inputs that are there first; in a session's graph, where a
    call waits for all of its inputs, as several calls.
    """
    if runs_if_fetched():
        return calls
    return [call]


def fetchable_call(
    function: Callable[[np.ndarray], None], values: tf.Tensor
) -> tf.Operation | None:
    """Return an operation for a session to fetch that calls a function with values; None as in ``fetchable``."""
    if not runs_if_fetched():
        return None
    return tf.numpy_function(function, [values], [])


def overwriting(target: Any, output: tf.Tensor) -> tf.Tensor:
    """Return a result. In a session's graph, fetching it overwrites ``target`` if that is a variable, as on Ascend."""
    if not runs_if_fetched() or not hasattr(target, "assign"):
        return output
    with tf.control_dependencies([tf.compat.v1.assign(target, output)]):
        return tf.identity(output)


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor of a graph, this one or one around it, of which a tensor is a copy."""
    # Functions copy tensors of the graph around them as captures, and AutoGraph adds identities.
    while True:
        if tensor.op.type in ("Identity", "IdentityN"):
            tensor = tensor.op.inputs[tensor.value_index]
            continue
        captures = getattr(tensor.graph, "captures", ())
        outer = next((out for out, inside in captures if inside is tensor), None)
        if not tf.is_symbolic_tensor(outer):
            return tensor
        tensor = outer


# Calls of Python in a ``tf.function``

# ``tf.numpy_function`` keeps the Python function, and with it 2 to 7 KB, for as long as the process lives: it hangs it
# on the outermost graph, which for a ``tf.function`` is the process's default graph (TensorFlow 2.20,
# ``script_ops._internal_py_func``). A script that retraces would grow forever. Here all calls share one such function,
# which finds the one to run by an id, and the id is an eager tensor that the graph captures: whatever can run
# the graph holds the tensor, and when the tensor goes, so does the function. A weak reference to the graph would go too
# early: another graph may have inlined it. Can go when ``tf.numpy_function`` releases the function with the graph.
# TensorFlow copies smaller tensors (``capture_container._EAGER_CONST_THRESHOLD``).
_FEWEST_CAPTURED_ELEMENTS = 129
functions_by_id: dict[int, Callable] = {}


def python_call(function: Callable, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> Any:
    """Add an operation to the graph of a ``tf.function`` that calls a Python function with the inputs as numpy arrays;
    return the results as a list, or the operation if there are none. The function returns an array for each dtype, and
    must not refer to tensors of the graph.
    """
    function_id = next(_ids)
    with tf.init_scope(), tf.device("CPU:0"):
        # Filled, not constant, for the reason that ``compat.to_tensor`` tells.
        captured = tf.fill([_FEWEST_CAPTURED_ELEMENTS], np.int64(function_id))
    functions_by_id[function_id] = function
    weakref.finalize(captured, functions_by_id.pop, function_id, None)
    # In nested functions a capture has to pass through each graph in between.
    inputs = [compat.through_outer_graphs(captured), *inputs]
    return tf.raw_ops.PyFuncStateless(input=inputs, token=_registered()[0], Tout=list(dtypes))


_LATEST_ATTRIBUTE = "_npu_device_latest_calls"


class Order:
    """One order of calls: each call runs after all earlier ones of the same order."""

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._variable = compat.plain_variable(tf.constant(0, tf.int64))

    def call(
        self,
        function: Callable[..., Sequence],
        inputs: Sequence[tf.Tensor],
        dtypes: Sequence[tf.DType] = (),
    ) -> list[tf.Tensor]:
        """Add an operation to the graph that calls a Python function with the inputs as numpy arrays; TensorFlow never
        prunes it. The function returns an int64, and one array for each dtype.
        """
        # To TensorFlow the operation has no state, or it would be ordered with all other stateful operations. It
        # reads the order's variable, and its first result is written there: TensorFlow keeps reads and writes of a
        # variable in order. The value means nothing: it is the ticket, or the time, that the function returns anyway,
        # since a result that only serves for this would cost 10 µs.

        def in_order(_: Any, *arrays: Any) -> Sequence:
            return function(*arrays)

        graph = tf.compat.v1.get_default_graph()
        latest = getattr(graph, _LATEST_ATTRIBUTE, {})
        with tf.control_dependencies(latest.get(self, [])):
            variable = compat.through_outer_graphs(self._variable.handle)
            token = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.int64)
            results = python_call(in_order, [token, *inputs], [tf.int64, *dtypes])
            written = tf.raw_ops.AssignVariableOp(resource=variable, value=results[0])
        if compat.lacks_order(graph):
            setattr(graph, _LATEST_ATTRIBUTE, {**latest, self: [written]})
        return list(results)


def call_now(
    function: Callable[..., list], inputs: Sequence, specs: Sequence[tf.TensorSpec]
) -> list:
    """Call a Python function with arrays, at once or in the graph that is built now, ordered by its data only.
    It returns an array for each spec, lives as long as the graph, and must not refer to it.
    """
    tensors = list(map(tf.convert_to_tensor, inputs))
    if tf.executing_eagerly():
        return [tf.constant(result) for result in function(*map(compat.to_array, tensors))]
    results = python_call(function, tensors, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs):
        result.set_shape(spec.shape)
    return list(results)


def _call_by_id(captured: Any, *arrays: Any) -> Any:
    return functions_by_id[int(captured[0])](*arrays)


@functools.cache
def _registered() -> tuple[bytes, tf.Graph]:
    """Return TensorFlow's name of ``_call_by_id``, and the graph with which it would forget that."""
    with tf.Graph().as_default() as graph:
        called = tf.numpy_function(_call_by_id, [tf.constant([0])], [], name="call")
    return called.get_attr("token"), graph


# The step's data. The end of a dataset is an error inside the step, which cancels what hasn't run yet. A collective
# that needs none of the step's data could run on some ranks and not on others, and their counts would differ from then
# on.

# Operations that can end a step: reads of data, and the script's own checks and functions.
_MAY_END = re.compile(
    r"IteratorGetNext(Sync)?|MultiDeviceIteratorGetNextFromShard|OptionalGetValue|QueueDequeue(Many|UpTo)?V2|"
    r"Assert|(Eager)?PyFunc"
)
_TYPES_OF_CALLS = ("PartitionedCall", "StatefulPartitionedCall")

_data_reads = weakref.WeakKeyDictionary[tf.Graph, tuple[int, list[str]]]()


def step_data() -> Sequence[tf.Operation]:
    """Return what the next collective of the graph being built must come after: the reads of data before it, and the
    inputs of a nested function, branch or loop. In eager mode, earlier operations have ended.
    """
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    count, names = _data_reads.get(graph, (0, []))
    operations = graph.get_operations()
    # Each operation is looked at once, however many collectives a graph has.
    new_operations = operations[count:]
    names = names + [operation.name for operation in new_operations if _may_end(graph, operation)]
    _data_reads[graph] = (len(operations), names)
    control_inputs = [graph.get_operation_by_name(name) for name in names]
    if isinstance(getattr(graph, "outer_graph", None), compat.FuncGraph):
        # TensorFlow may inline the call, and then runs operations without inputs before the call has its inputs.
        for tensor in graph.inputs:
            if tensor.dtype not in (tf.resource, tf.variant):
                control_inputs.append(tf.identity(tensor).op)
    return control_inputs


def _may_end(graph: tf.Graph, operation: tf.Operation) -> bool:
    types: Iterable[str] = [operation.type]
    if operation.type in _TYPES_OF_CALLS:
        # A function that is called may read data, too.
        types = compat.operations_of_call(graph, operation)
    return any(map(_MAY_END.fullmatch, types))


# Gradients. ``tf.custom_gradient`` does the same; in a graph it keeps the graph forever (TensorFlow 2.20: each call
# registers a gradient under a name of its own, which nothing removes), so that each retracing would cost memory. Can go
# when TensorFlow removes such a gradient with its graph.

_GRADIENT = "npu_device_gradient"
_GRADIENTS_ATTRIBUTE = "_npu_device_gradients"
_LAST_ATTRIBUTE = "_npu_device_last_gradients"
_COUNT_ATTRIBUTE = "_npu_device_ordered_operations"


def _dense(upstream: Sequence) -> list:
    """Return gradients as tensors; those of a result whose rows were picked are ``tf.IndexedSlices``."""
    require_order("the gradient of a collective was computed")
    return [
        tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in upstream
    ]


_gradients = weakref.WeakValueDictionary[int, Callable[..., list]]()
"""The gradient function of each call in a graph, which keeps it."""


def differentiable(
    results: Sequence[tf.Tensor], backward: Callable[..., Sequence], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return results that were made from tensors, with a gradient of their own: ``backward`` returns the gradients of
    the tensors for those of the results.
    """
    if tf.executing_eagerly():
        # Without a tape nobody asks for the gradient, and the identity would cost a copy.
        if not compat.a_tape_records():
            return list(results)
        copies = list(map(tf.identity, results))
        compat.record_operation(
            _GRADIENT, copies, list(tensors), lambda *upstream: backward(*_dense(upstream))
        )
        return copies
    graph = tf.compat.v1.get_default_graph()
    count = len(results)
    gradient_id = next(_ids)

    def gradients(*upstream: Any) -> list:
        """Return the gradients of the results, which have none, and of the inputs."""
        with compat.gradient_of(graph):
            incoming = _dense(upstream[:count])
            # The results are inputs of the identity as well, and get no gradient from it.
            return [None] * count + _in_gradient(graph, lambda: backward(*incoming))

    _gradients[gradient_id] = gradients
    # The functions hang on the graph, not in a table: if they refer to its tensors, both go together.
    setattr(graph, _GRADIENTS_ATTRIBUTE, [*getattr(graph, _GRADIENTS_ATTRIBUTE, []), gradients])
    arguments = [*results, *tensors]
    with graph.gradient_override_map({"IdentityN": _GRADIENT}):
        copies = tf.identity_n(arguments, name=f"{_GRADIENT}_{gradient_id}")
    compat.record_operation(_GRADIENT, copies, arguments, gradients)
    return list(copies[:count])


def _in_gradient(forward: tf.Graph, make: Callable[[], Sequence]) -> list:
    """Return the gradients that ``make`` makes; ``forward`` is the graph of what they are of."""
    graph = compat.graph_being_built()
    if graph in (None, forward):
        return list(make())
    # The gradient of a branch or a loop runs after those before it, too.
    function, inner = compat.graphs_of_function(graph)
    earlier = []
    if compat.lacks_order(function):
        earlier.append(compat.captured(inner, _after_earlier(function)))
    with tf.control_dependencies(earlier):
        tensors = list(after_all(make))
    if not inner:
        setattr(function, _LAST_ATTRIBUTE, [tensor for tensor in tensors if tensor is not None])
    return tensors


def _after_earlier(graph: tf.Graph) -> tf.Tensor:
    """Return a tensor of a graph that is ready after all that it has so far of operations with a state."""
    operations = graph.get_operations()
    count = getattr(graph, _COUNT_ATTRIBUTE, 0)
    setattr(graph, _COUNT_ATTRIBUTE, len(operations))
    stateful = list(filter(compat.is_stateful, operations[count:]))
    # Without an order, what follows a branch has to wait for a result of it.
    earlier = [*stateful, *getattr(graph, _LAST_ATTRIBUTE, [])]
    with graph.as_default(), tf.control_dependencies(earlier):
        return tf.constant(0)


@tf.RegisterGradient(_GRADIENT)
def _gradient(operation: tf.Operation, *upstream: Any) -> list:
    match = re.search(rf"{_GRADIENT}_(\d+)", operation.name.rpartition("/")[2])
    gradients = None
    if match is not None:
        gradients = _gradients.get(int(match.group(1)))
    if gradients is None:
        raise LookupError(
            f"the collective behind {operation.name!r} has no gradient any more: the function that it was traced in is "
            "gone. Trace the function again, not a saved copy of it."
        )
    return gradients(*upstream)
