"""The private parts of TensorFlow's graphs that the package uses: functions being traced, and their variables."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.distribute import distribute_lib as _distribute_lib
from tensorflow.python.eager import context as _context
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import (
    control_flow_util as _control_flow_util,
    control_flow_v2_func_graphs as _branches,
    resource_variable_ops as _resource_variable_ops,
    stateful_random_ops as _stateful_random_ops,
)
from tensorflow.python.saved_model import save_context as _save_context

from npu_device._src.compat.graph_walk import walk
from npu_device._src.compat.keras import inner_variable
from npu_device._src.compat.live_objects import live_objects


def variables_read() -> list[tuple[Any, tf.Tensor]]:
    """Return the variables that the ``tf.function`` being traced has read so far, each with the handle by which its
    graph knows it, in the order in which they were created; [] elsewhere.

    The order in which they are read may differ among ranks: one may look at a variable first.
    """
    graph = graph_being_built()
    # ``FuncGraph.variables`` is filled only when the function is complete.
    watched = getattr(graph, "_watched_variables", ())
    # There is nothing to report outside a function, or before a variable is read.
    if not watched:
        return []
    handles = {id(outer): inner for outer, inner in graph.captures}
    read = []
    for variable in watched:
        if id(variable.handle) in handles:
            read.append((variable, handles[id(variable.handle)]))
    # The id of a handle grows with each variable that is made.
    return sorted(read, key=lambda pair: int(pair[0].handle._id))


def graph_being_built() -> Any:
    """Return the default graph; None in eager mode."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def plain_variable(initial_value: Any, name: str | None = None, shape: Any = None) -> Any:
    """Return a variable that no surrounding scope of tf.distribute or Keras sees; they see each tf.Variable."""
    return _resource_variable_ops.ResourceVariable(
        initial_value, trainable=False, name=name, shape=shape
    )


def default_replica_context() -> Any:
    """Return TensorFlow's replica context outside strategies: one object for all threads and graphs."""
    return _distribute_lib._get_default_replica_context()


def functions_that_update(variables: Iterable) -> list[list[str]]:
    """Return for each variable the names of the functions in this process that set it to what they compute on their
    own: no other rank has a part in it.
    """
    names: dict[int, set[str]] = {}
    for variable in variables:
        names[id(inner_variable(variable).handle)] = set()
    for graph in live_objects([FuncGraph]):
        captured = [(outer, inner) for outer, inner in graph.captures if id(outer) in names]
        exchanged = _operations_after_exchanges(graph) if captured else set()
        for outer, inner in captured:
            # Inference reads moving statistics, and doesn't set them.
            setters = [user for user in inner.consumers() if user.type.startswith("Assign")]
            if any(setter.name not in exchanged for setter in setters):
                names[id(outer)].add(graph.name)
    return list(map(sorted, names.values()))


def _operations_after_exchanges(graph: Any) -> set[str]:
    """Return the names of the operations of a graph that depend on what ranks have exchanged in it."""
    exchanges = []
    for operation in graph.get_operations():
        if re.match("PyFunc|EagerPyFunc|Collective", operation.type):
            exchanges.append(operation)

    def users(operation: Any) -> list:
        return [user for tensor in operation.outputs for user in tensor.consumers()]

    return {operation.name for operation in walk(exchanges, users)}


def is_saving() -> bool:
    """Return whether a function is being traced for a SavedModel."""
    return bool(_save_context.in_save_context())


_CONTROL_FLOW = (
    _branches.CondBranchFuncGraph,
    _branches.WhileCondFuncGraph,
    _branches.WhileBodyFuncGraph,
)


def through_outer_graphs(tensor: Any) -> Any:
    """Return an eager tensor as the branch or loop that is being built sees it, captured by its outer graphs up to that
    of the function. Elsewhere this is the tensor itself.

    A graph inside another one captures it by itself, but TensorFlow can't build the gradient of a branch whose own
    gradient captures an eager tensor (TensorFlow 2.20, ``cond_v2._resolve_grad_inputs``; tensorflow/tensorflow#44598).
    Can go when it can.
    """
    function, inner = graphs_of_function(graph_being_built())
    # A tensor needs no capture without a branch or loop to pass through, or in one of a session's graph.
    if not inner or not isinstance(function, FuncGraph):
        return tensor
    # TensorFlow puts the placeholder of a capture into the graph that is current.
    with function.as_default():
        tensor = function.capture(tensor)
    return captured(inner, tensor)


def graphs_of_function(graph: Any) -> tuple[Any, list]:
    """Return the graph of the function that a graph is in, and in it those of branches and loops, outermost first."""
    inner: list = []
    while isinstance(graph, _CONTROL_FLOW):
        inner.insert(0, graph)
        graph = graph.outer_graph
    return graph, inner


def captured(inner: Iterable, tensor: Any) -> Any:
    """Return a tensor of a function as the innermost of its branches and loops sees it."""
    for graph in inner:
        with graph.as_default():
            tensor = graph.capture(tensor)
    return tensor


_building = threading.local()
_VALUES_OF_CALL = "_npu_device_values_of_call"


@contextlib.contextmanager
def gradient_of(graph: tf.Graph) -> Iterator[None]:
    """Build a gradient of operations in this graph: ``at_each_call`` gives what their function has been given."""
    before = getattr(_building, "forward", None)
    _building.forward, _ = graphs_of_function(graph)
    try:
        yield
    finally:
        _building.forward = before


def at_each_call(key: str, value: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return a tensor of the ``tf.function`` being traced that ``value`` gives at each call, in the thread that calls.

    ``value`` returns an eager tensor: int32, shape []. A function called in another one passes on the outer tensor.
    ``capture_call_time_value`` alone fails for a function that is called in a branch or a loop, since it asks the
    branch for the value (TensorFlow 2.20, ``FuncGraph.capture_call_time_value``). Can go when it asks the function.
    """
    function, inner = graphs_of_function(graph_being_built())
    if function is None:
        return value()
    # A session's graph has no thread that calls it, and gets 0.
    if not isinstance(function, FuncGraph):
        return tf.constant(0)
    values = getattr(function, _VALUES_OF_CALL, {})
    # The values hang on the graph, and go with it.
    setattr(function, _VALUES_OF_CALL, values)
    forward = getattr(_building, "forward", None)
    if key not in values:
        if forward in (None, function):
            values[key] = _value_at_each_call(function, key, value)
        else:
            # TensorFlow calls the gradient of a function with values of the function only, and has no gradient where
            # others are needed (TensorFlow 2.20, ``_TapeGradientFunctions._build_functions_for_outputs``).
            given = getattr(forward, _VALUES_OF_CALL, {}).get(key)
            if given is None:
                # Only the gradient calls in this group: 0 on all ranks, as for the main thread.
                return tf.constant(0)
            with function.as_default():
                values[key] = function.capture(given)
    return captured(inner, values[key])


def _value_at_each_call(function: FuncGraph, key: str, value: Callable[[], tf.Tensor]) -> tf.Tensor:
    captures = function._function_captures
    with function.as_default():
        function.capture_call_time_value(value, tf.TensorSpec([], tf.int32), key=key)

    def current() -> list[tf.Tensor]:
        return [at_each_call(key, value)]

    current.output_spec = captures.by_ref_external[key].output_spec  # type: ignore[attr-defined]
    captures.by_ref_external[key] = current
    return captures.by_ref_internal[key]


def is_default_strategy(strategy: Any) -> bool:
    """Return True for the strategy of ``tf.distribute`` that there is outside of all scopes; its class isn't public."""
    return type(strategy).__name__ == "_DefaultDistributionStrategy"


def keep_whole(output: tf.Tensor) -> None:
    """Let TensorFlow run a ``tf.cond``, whose output this is, as one operation.

    By default it puts the branches into the graph around them, with an operation for each input of a branch, in each
    step: with hundreds of variables a millisecond. Not for operations of a GPU, which has no such conditions.
    """
    operation = output.op
    # Identities may stand between the output and its operation.
    while operation.type not in ("If", "StatelessIf"):
        operation = operation.inputs[0].op
    operation._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))


def run_independently(operation: Any) -> None:
    """Keep automatic control dependencies from running a stateful operation of a tf.function after others."""
    manager = operation.graph.experimental_acd_manager
    # Only a graph with this manager has automatic control dependencies.
    if manager is not None:
        manager.run_independently(operation)


def lacks_order(graph: tf.Graph) -> bool:
    """Return True for the graph that TensorFlow makes for the gradient of a function: it orders no operations in it."""
    return isinstance(graph, FuncGraph) and graph.experimental_acd_manager is None


def operations_of_call(graph: Any, call: Any) -> set[str]:
    """Return the types of the operations in the function that an operation calls, and in those that it calls."""
    types = set()

    def called_by(name: str) -> Iterator[str]:
        for node in graph._get_function(name).cached_definition.node_def:
            types.add(node.op)
            if node.attr["f"].func.name:
                yield node.attr["f"].func.name

    for _ in walk([call.get_attr("f").name], called_by, str):
        pass
    return types


_CALLS = {
    "If": ("then_branch", "else_branch"),
    "While": ("cond", "body"),
    "Case": ("branches",),
    "PartitionedCall": ("f",),
}


def functions_of(operation: Any) -> dict[str, list]:
    """Return the graphs of the functions that an operation calls, by the name of its attribute; none for most."""
    base_type = operation.type.replace("Stateless", "").replace("Stateful", "")
    graphs = {}
    for name in _CALLS.get(base_type, ()):
        functions = operation.get_attr(name)
        if not isinstance(functions, list):
            functions = [functions]
        # Functions are found by name in the graph that calls them.
        graphs[name] = [
            operation.graph._get_function(function.name).graph for function in functions
        ]
    return graphs


def replace_inputs(users: Iterable, tensor: Any, replacement: Any) -> None:
    """Replace a tensor that operations take, in a graph that has not run yet."""
    for user in users:
        for index, given in enumerate(user.inputs):
            if given is tensor:
                user._update_input(index, replacement)


def feed_later_users(identity: Any, tensor: Any) -> None:
    """Let an identity pass on another tensor to the operations that come later, in a graph that has not run yet."""
    [earlier] = identity.inputs
    [output] = identity.outputs
    replace_inputs(output.consumers(), output, earlier)
    # The new tensor may depend on operations that wait for the identity.
    for waiting in identity._control_outputs:
        others = [source for source in waiting.control_inputs if source is not identity]
        waiting._remove_all_control_inputs()
        waiting._add_control_inputs([*others, earlier.op])
    replace_inputs([identity], earlier, tensor)


def set_seed_of(operation: Any, seed: int) -> None:
    """Set the graph-level part of the seed of a random operation, in a graph that has not run yet."""
    # ``random_seed.get_seed`` gives no larger seeds.
    bounded_seed = seed % (2**31 - 1)
    operation._set_attr("seed", attr_value_pb2.AttrValue(i=bounded_seed))


def random_generator_of_process() -> Any:
    """Return the generator of ``tf.random.get_global_generator()``; None if there isn't one, which that would make."""
    return _stateful_random_ops.global_generator


def tensors_behind(
    tensors: Iterable, until: Callable[[Any], bool] = lambda tensor: False
) -> Iterator:
    """Yield tensors of a graph and those that they are computed from, each once, up to some that are left out."""

    def inputs(tensor: Any) -> Iterator:
        return itertools.filterfalse(until, tensor.op.inputs)

    return walk(itertools.filterfalse(until, tensors), inputs)


def is_stateful(operation: Any) -> bool:
    if operation.type not in _stateful:
        # TensorFlow reads the definition anew for each operation, so the answer is kept by type.
        _stateful[operation.type] = bool(operation.op_def.is_stateful)
    return _stateful[operation.type]


_stateful: dict[str, bool] = {}
"""By the type of an operation."""


def computed_again(tensor: Any, replacements: Mapping[str, Any]) -> Any:
    """Return a tensor of a graph as it is with ``replacements`` for some tensors, by their names.

    Returns None if it doesn't depend on those, or takes an operation that draws numbers or has an effect.
    """
    copies = dict[str, Any](replacements)
    sources = tensors_behind([tensor], lambda source: source.name in replacements)
    operation_names = {source.op.name for source in sources}
    # Operations stand in the order in which they were created, so that inputs come first.
    for operation in tensor.graph.get_operations():
        if operation.name not in operation_names or not any(
            source.name in copies for source in operation.inputs
        ):
            continue
        # A copy would draw other numbers, or have its effect twice.
        if is_stateful(operation):
            return None
        inputs = [copies.get(source.name, source) for source in operation.inputs]
        dtypes = [output.dtype for output in operation.outputs]
        attributes = dict(operation.node_def.attr)
        copy = tensor.graph.create_op(operation.type, inputs, dtypes, attrs=attributes)
        for original, copied in zip(operation.outputs, copy.outputs):
            copies[original.name] = copied
    return copies.get(tensor.name)


def compiled_by_xla() -> bool:
    graph = graph_being_built()
    return graph is not None and bool(_control_flow_util.GraphOrParentsInXlaContext(graph))


def graph_around_xla() -> Any:
    """Return the function's graph that calls what XLA compiles of the graph being built; None if Python calls it."""
    caller = None
    graph = graph_being_built()
    while graph is not None:
        # The graph is compiled by XLA while it calls.
        if _control_flow_util.InXlaContext(graph):
            caller = graph
        graph = getattr(graph, "outer_graph", None)
    if not isinstance(caller, FuncGraph):
        return None
    return caller


# AutoGraph makes this of a loop over a dataset: a function that runs for one element after the other, as the loop does
# (TensorFlow 2.15 to 2.21).
_LOOP_OVER_DATASET = "Dataset_scan_scan_body"


def place_without_order() -> str | None:
    """Return in words where the graph being built runs, if TensorFlow runs several such graphs at once; else None."""
    graph = graph_being_built()
    while graph is not None:
        name = getattr(graph, "name", "")
        if name.startswith("Dataset_") and not name.startswith(_LOOP_OVER_DATASET):
            return f"the function of a dataset ({name})"
        # Only the name shows ``pfor`` while it is traced (TensorFlow 2.20); when it runs, it is a loop like any other.
        loop = re.match(r"(.*/)?loop_body(_\d+)?(?=/|$)", graph.get_name_scope())
        names = {operation.name for operation in graph.get_operations()}
        if loop and f"{loop[0]}/PlaceholderWithDefault" in names:
            return "a loop that TensorFlow vectorizes (tf.vectorized_map, tape.jacobian or batch_jacobian)"
        graph = getattr(graph, "outer_graph", None)
    return None


def handle_of(variable: Any) -> Any:
    return getattr(inner_variable(variable), "handle", None)


def value_of_handle(handle: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype_of_variable(handle))


def dtype_of_variable(handle: Any) -> Any:
    """Return the dtype of the variable behind an eager handle; None for another resource, such as a table."""
    description = getattr(handle, "_handle_data", None)
    if description is None or not description.is_set or len(description.shape_and_type) != 1:
        return None
    return tf.as_dtype(description.shape_and_type[0].dtype)


@contextlib.contextmanager
def without_rewriting() -> Iterator[None]:
    """Run functions as they have been traced in the block.

    TensorFlow's rewriting takes longer than a few samples, and fuses a convolution, a batch normalisation that doesn't
    train, and a tanh to what no CPU kernel supports (TensorFlow 2.20).
    """
    current = _context.context()
    options = dict(current._optimizer_experimental_options)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        current._optimizer_experimental_options = options
        current._thread_local_data.function_call_options = None
