"""Differences between TensorFlow and Keras releases, and the private parts of TensorFlow that the package uses.

Only this module checks versions or imports from ``tensorflow.python``. Everything else uses the names
below. Each says when it can go; one that doesn't stays as long as TensorFlow has no public counterpart.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import tensorflow as tf

# Scripts take config_pb2, rewriter_config_pb2, session and session_run_hook from the adapter's star import.
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2  # noqa: F401
from tensorflow.python.client import session  # noqa: F401

# The eager context has no public counterpart for collective ops over several processes and for idle threads.
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record
from tensorflow.python.framework import ops as _ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as _branches
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.training import session_run_hook  # noqa: F401
from tensorflow.python.util import tf_stack as _tf_stack


def eager_context() -> Any:
    """Return the process's eager context (not created by this call)."""
    return _context.context()


def random_state() -> tuple[int | None, Any]:
    """Return TensorFlow's global seed, None if unset, and the state of eager operations without a seed of their own."""
    current = _context.context()
    return current._seed, current._rng.getstate() if current._seed is not None else None


def set_random_state(state: tuple[int | None, Any]) -> None:
    """Set TensorFlow's random state to that of another process; see ``random_state``."""
    seed, position = state
    tf.random.set_seed(seed)
    if position is not None:
        _context.context()._rng.setstate(position)


def eager_mode() -> Any:
    """Return a context manager in which the calling thread runs eagerly, whatever graph the process builds, also after
    ``tf.compat.v1.disable_v2_behavior()``.
    """
    return _context.eager_mode()


def variables_read() -> list[tuple[Any, tf.Tensor]]:
    """Return the variables that the ``tf.function`` being traced has read so far, each with the handle by which its
    graph knows it, in the order in which they were created; [] elsewhere.

    The order in which they are read may differ among ranks: one may look at a variable first.
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    watched = getattr(graph, "_watched_variables", ())  # ``FuncGraph.variables`` is filled at the end only
    handles = {id(outer): inner for outer, inner in graph.captures} if watched else {}
    read = [(variable, handles[id(variable.handle)]) for variable in watched if id(variable.handle) in handles]
    return sorted(read, key=lambda pair: int(pair[0].handle._id))


def to_tensor(value: Any) -> tf.Tensor:
    """Return a value as a tensor.

    TensorFlow keeps 0.7 KB forever for each new Python number that becomes a tensor in eager mode, but not for a list
    of numbers (2.20). Can go when it doesn't.
    """
    if isinstance(value, (int, float, complex)) and tf.executing_eagerly():
        return tf.reshape(tf.convert_to_tensor([value]), [])
    return tf.convert_to_tensor(value)


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Return an eager tensor as an array. ``np.asarray`` refuses a bfloat16 scalar (TensorFlow 2.20). Can go when
    it doesn't.
    """
    return np.asarray(tensor) if tensor.shape.rank else np.array(tensor.numpy(), tensor.dtype.as_numpy_dtype)


def context_is_initialized() -> bool:
    """Return True if TensorFlow has made its devices and thread pools, after which nothing can be configured."""
    current = _context.context_safe()
    return current is not None and current._context_handle is not None


def let_idle_threads_sleep() -> None:
    """Let the threads that TensorFlow is going to make sleep when idle; by default they use a core to look for work."""
    tf.config.get_visible_devices()  # or TensorFlow would take the visible GPUs from this configuration
    sleepy = config_pb2.ConfigProto.Experimental(disable_thread_spinning=True)
    _context.context()._config = config_pb2.ConfigProto(experimental=sleepy)


def renew_context_of_graphs() -> None:
    """Replace TensorFlow's context if eager mode is switched off for the whole process.

    Building a graph with a data set makes a context, only to register functions that the graph holds as well, and
    afterwards the collective runtime can't be configured any more. Nothing else lives in such a context.
    """
    if _context.default_execution_mode == _context.GRAPH_MODE and context_is_initialized():
        _context._reset_context()


def server_def(cluster: dict[str, list[str]], job: str, task: int, port: int, config: Any) -> Any:
    """Return the protobuf that starts TensorFlow's gRPC server inside the eager context."""
    from tensorflow.core.protobuf import tensorflow_server_pb2

    return tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(cluster).as_cluster_def(),
        default_session_config=config,
        job_name=job,
        task_index=task,
        protocol="grpc",
        port=port,
    )


def plain_variable(initial_value: Any, name: str | None = None) -> Any:
    """Return a variable that no surrounding tf.distribute or Keras scope sees (tf.Variable goes through their
    creators).
    """
    return _resource_variable_ops.ResourceVariable(initial_value, trainable=False, name=name)


_CONTROL_FLOW = (_branches.CondBranchFuncGraph, _branches.WhileCondFuncGraph, _branches.WhileBodyFuncGraph)


def through_outer_graphs(tensor: Any) -> Any:
    """Return an eager tensor as the branch or loop that is being built sees it, captured by its outer graphs up to that
    of the function. Elsewhere this is the tensor itself.

    A graph inside another one captures it by itself, but TensorFlow can't build the gradient of a branch whose own
    gradient captures an eager tensor (TensorFlow 2.20, ``cond_v2._resolve_grad_inputs``). Can go when it can.
    """
    graphs, graph = [], None if tf.executing_eagerly() else _ops.get_default_graph()
    while isinstance(graph, _CONTROL_FLOW):
        graphs.append(graph)
        graph = graph.outer_graph
    if not graphs or not isinstance(graph, FuncGraph):
        return tensor
    for outer in [graph, *reversed(graphs)]:
        with outer.as_default():  # where TensorFlow puts the placeholder
            tensor = outer.capture(tensor)
    return tensor


def is_shuffled_without_seed(dataset: Any) -> bool:
    """Return True if a ``tf.data.Dataset`` or one that it is made of is shuffled in an order that no seed fixes."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    # Both are 0 where neither shuffle nor tf.random.set_seed was given a seed (TensorFlow 2.15 to 2.21).
    if "Shuffle" in type(dataset).__name__ and all(seed is not None and int(seed) == 0 for seed in seeds):
        return True
    return any(is_shuffled_without_seed(other) for other in getattr(dataset, "_inputs", list)())


def handle_of(variable: Any) -> Any:
    """Return the resource handle of a variable, of TensorFlow or of Keras; None if it has none."""
    inner = variable if hasattr(variable, "handle") else getattr(variable, "_value", None)  # Keras 3.0 to 3.15
    return getattr(inner, "handle", None)


def stack() -> list[Any]:
    """Return the frames of the calling thread, outermost first (``filename``, ``lineno``, ``name``).

    For code rewritten by AutoGraph, they show the lines that the user wrote.
    """
    return list(_tf_stack.extract_stack())


def run_independently(operation: Any) -> None:
    """Run a stateful operation of a tf.function in no order with others of its kind.

    There is no public way; without this, automatic control dependencies run them one by one.
    """
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)


def replace_input(operation: Any, index: int, tensor: Any) -> None:
    """Replace an input of an operation by another tensor, in a graph that has not run yet.

    There is no public way to give an operation inputs that come after it.
    """
    operation._update_input(index, tensor)


def operations_of_call(graph: Any, call: Any) -> set[str]:
    """Return the types of the operations in the function that an operation of a graph calls, and in what that one
    calls.
    """
    kinds: set[str] = set()
    names, seen = [call.get_attr("f").name], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in graph._get_function(name).cached_definition.node_def:
            kinds.add(node.op)
            names += [node.attr["f"].func.name] if node.attr["f"].func.name else []
    return kinds


def record_operation(name: str, outputs: Any, inputs: Any, backward: Any) -> None:
    """Tell the gradient tapes that watch how the gradients of the inputs come from those of the outputs."""
    _record.record_operation(name, outputs, inputs, backward)


def may_be_differentiated() -> bool:
    """Return False in eager mode without a gradient tape."""
    return not tf.executing_eagerly() or bool(_record.could_possibly_record())


def compiled_by_xla() -> bool:
    """Return True while tracing a function that XLA will compile (``jit_compile=True``)."""
    if tf.executing_eagerly():
        return False
    return bool(_control_flow_util.GraphOrParentsInXlaContext(_ops.get_default_graph()))


def place_without_order() -> str | None:
    """Return in words where the graph being built runs, if TensorFlow runs several such graphs at once; else None."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "name", "").startswith("Dataset_"):
            return f"the function of a data set ({graph.name})"
        found = re.match(r"(.*/)?loop_body(_\d+)?(?=/|$)", graph.get_name_scope())
        if found and f"{found[0]}/PlaceholderWithDefault" in {operation.name for operation in graph.get_operations()}:
            return "a loop that TensorFlow vectorizes (tf.vectorized_map, tape.jacobian or batch_jacobian)"
        graph = getattr(graph, "outer_graph", None)
    return None


def has_nccl() -> bool:
    """Return True if TensorFlow is built with NCCL. It has no public way to ask."""
    from tensorflow.python.framework import kernels

    return bool(kernels.get_registered_kernels_for_op("NcclAllReduce").kernel)


def keras_of(thing: object) -> Any:
    """Return the Keras package that an optimizer, a model or a layer belongs to; tf.keras if it can't be determined."""
    for cls in type(thing).__mro__:
        root = cls.__module__.split(".", 1)[0]
        if root in ("keras", "tf_keras") and root in sys.modules:
            return sys.modules[root]
    return tf.keras


def is_keras_3(keras: Any) -> bool:
    """Return True for Keras 3 and later; False for tf_keras and for the Keras 2 of TensorFlow 2.15."""
    version = getattr(keras, "__version__", None) or getattr(keras, "version", lambda: "2")()
    return int(str(version).split(".", 1)[0]) >= 3


def loss_scale_class_of_tf_keras(keras: Any, optimizer: object) -> Any:
    """Return the class of tf-keras's ``LossScaleOptimizer(optimizer)``: one for legacy optimizers, one for others.

    The exported name chooses between the two, and a subclass of it can't add methods. Can go when tf-keras has no
    legacy optimizers.
    """
    module = sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]
    legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
    return module.LossScaleOptimizer if legacy else module.LossScaleOptimizerV3


def tensorflow_version() -> str:
    """Return TensorFlow's version, for messages."""
    return str(tf.__version__)


def estimator_module() -> Any:
    """Return ``tf.compat.v1.estimator`` in TensorFlow 2.15; None from 2.16 on, which dropped it. Can go with 2.15."""
    return getattr(tf.compat.v1, "estimator", None)


def session_backend() -> Any:
    """Return the Keras backend that supports sessions (``get_session``, ``set_session``).

    It is tf-keras's if tf.keras is Keras 2; under Keras 3 it is the one inside TensorFlow, which models don't use.
    """
    backend = tf.compat.v1.keras.backend
    if hasattr(backend, "set_session"):
        return backend
    from tensorflow.python.keras import backend as inside_tensorflow

    return inside_tensorflow


def belongs_to_keras(thing: Any) -> bool:
    """Return True for a function or class of Keras itself, not the user's."""
    return str(thing.__module__).split(".", 1)[0] in ("keras", "tf_keras")


def layers_of(model: Any) -> list[Any]:
    """Return a model's layers, including nested ones. No Keras has a public way to get those."""
    return list(model._flatten_layers(include_self=False))  # in tf-keras 2.15 to 2.20, and Keras 3.0 to 3.15


def build_optimizer(optimizer: Any, variables: Any) -> None:
    """Create an optimizer's variables, if they don't exist. A legacy optimizer of tf-keras has no public way."""
    if is_keras_3(keras_of(optimizer)):
        if not optimizer.built:
            optimizer.build(variables)
    elif hasattr(optimizer, "build"):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):
        optimizer._create_all_weights(variables)


def begin_fit_at(model: Any, epoch: int | None) -> None:
    """Let the ``fit`` that has called ``on_train_begin`` begin with an epoch; None undoes it, for later ones.

    No Keras has a public way; their own ``BackupAndRestore`` does the same.
    """
    if is_keras_3(keras_of(model)):
        model._initial_epoch = epoch
    else:
        model._training_state = None if epoch is None else _Counters(epoch)


class _Counters:
    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def maybe_load_initial_counters_from_ckpt(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self._epoch, 0


def iterators_made(model: Any, used: int, knows_length: bool) -> list[int]:
    """Return how many iterators of its data ``fit`` may have made when it has used some, most likely one last.

    Args:
        model: the model.
        used: the number of iterators from which it has taken batches.
        knows_length: ``fit`` knows the number of steps in an epoch.
    """
    # From Keras 3.7 on, an epoch ends by making an iterator; the next one uses it only if steps_per_epoch is given.
    version = str(getattr(keras_of(model), "__version__", "2.0")).split(".")
    makes_more = knows_length and (int(version[0]), int(version[1])) >= (3, 7)
    return sorted({used, 2 * used}) if makes_more else [used]


def dataset_of(iterator: Any) -> Any:
    """Return the data set of an eager ``tf.data`` iterator; None for another one. It has no public name."""
    return getattr(iterator, "_dataset", None)


def is_generated(dataset: Any) -> bool:
    """Return True if the elements of a ``tf.data.Dataset`` come from a Python generator; also of anything else."""
    if not isinstance(dataset, tf.data.Dataset):
        return True
    function = getattr(getattr(dataset, "_map_func", None), "function", None)  # from_generator is a flat_map
    operations = function.graph.get_operations() if function is not None else []
    return any(operation.type == "GeneratorDataset" for operation in operations) or any(
        map(is_generated, dataset._inputs())
    )


def optimizer_variables(optimizer: Any, weights: Any) -> list[Any]:
    """Return all variables of an optimizer, including its learning rate and loss scale.

    In Keras 3 ``variables`` has them all. In tf-keras it lacks the learning rate and the loss scale; that of a legacy
    optimizer lacks all hyperparameters, and a restored checkpoint changes its order.
    """
    if is_keras_3(keras_of(optimizer)):
        return list(optimizer.variables)
    scale: Any = getattr(optimizer, "_loss_scale", None)
    found = [scale.current_loss_scale, scale.counter] if hasattr(scale, "current_loss_scale") else []
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "_hyper"):
        if tf.executing_eagerly():
            optimizer._create_hypers()
        found += [optimizer.iterations, *(optimizer._hyper[name] for name in sorted(optimizer._hyper))]
        found += _slots(optimizer, weights)
    else:
        found += [getattr(optimizer, "learning_rate", None)]
    more = getattr(optimizer, "variables", ())
    found += more() if callable(more) else more
    return [variable for variable in found if hasattr(variable, "assign")]


def _slots(optimizer: Any, weights: Any) -> list[Any]:
    found = []
    for weight in weights:
        for name in sorted(optimizer.get_slot_names()):
            try:
                found.append(optimizer.get_slot(weight, name))
            except KeyError:  # a weight that it doesn't train
                continue
    return found
