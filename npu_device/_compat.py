"""Differences between TensorFlow and Keras releases, and the few private doors of TensorFlow that the package goes
through.

This is the only place that asks for a version or imports from ``tensorflow.python``. Everything else uses the names
below.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

# Scripts take config_pb2, rewriter_config_pb2, session and session_run_hook from the adapter's star import.
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2  # noqa: F401
from tensorflow.python.client import session  # noqa: F401

# The eager context has no public counterpart for collective ops over several processes;
# tf.distribute.MultiWorkerMirroredStrategy goes through the same calls.
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.training import session_run_hook  # noqa: F401
from tensorflow.python.util import tf_stack as _tf_stack


def eager_context() -> Any:
    """The process's eager context (not created by this call)."""
    return _context.context()


def eager_mode() -> Any:
    """A context manager in which the calling thread runs eagerly, whatever graph the process builds, and after
    ``tf.compat.v1.disable_v2_behavior()`` too.
    """
    return _context.eager_mode()


def context_is_initialized() -> bool:
    """True when TensorFlow has made its devices and thread pools, after which nothing can be configured any more."""
    current = _context.context_safe()
    return current is not None and current._context_handle is not None


def renew_context_of_graphs() -> None:
    """Make TensorFlow's context anew where eager mode is switched off for the whole process.

    Building a graph with a data set makes a context, only to register functions that the graph holds as well, and
    afterwards the collective runtime can't be configured any more. Nothing else lives in such a context.
    """
    if _context.default_execution_mode == _context.GRAPH_MODE and context_is_initialized():
        _context._reset_context()


def coordinated_job(name: str, num_tasks: int) -> Any:
    """The protobuf that names a job of the coordination service.

    Its module moved between 2.15 and 2.20; the eager context imports it from the right place in each release.
    """
    return _context.coordination_config_pb2.CoordinatedJob(name=name, num_tasks=num_tasks)


def server_def(cluster: dict[str, list[str]], job: str, task: int, port: int, config: Any) -> Any:
    """The protobuf that starts TensorFlow's gRPC server inside the eager context."""
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
    """A variable that no surrounding tf.distribute or Keras scope gets to see (tf.Variable goes through their
    creators).
    """
    return _resource_variable_ops.ResourceVariable(initial_value, trainable=False, name=name)


def stack() -> list[Any]:
    """The frames of the calling thread, outermost first (``filename``, ``lineno``, ``name``).

    Code that AutoGraph has rewritten shows the lines that the user wrote.
    """
    return list(_tf_stack.extract_stack())


def run_independently(operation: Any) -> None:
    """In a tf.function: run an operation that has a state, but in no order with others of its kind.

    There is no public way; without it automatic control dependencies run them one after the other.
    """
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)


def replace_input(operation: Any, index: int, tensor: Any) -> None:
    """In a graph that has not run yet: let an operation take another tensor in the place of an input.

    There is no public way to give an operation inputs that come after it.
    """
    operation._update_input(index, tensor)


def may_be_differentiated() -> bool:
    """False in eager mode without a gradient tape."""
    return not tf.executing_eagerly() or bool(_record.could_possibly_record())


def compiled_by_xla() -> bool:
    """True while a function is traced that XLA will compile (``jit_compile=True``)."""
    if tf.executing_eagerly():
        return False
    return bool(_control_flow_util.GraphOrParentsInXlaContext(_ops.get_default_graph()))


def keras_of(thing: object) -> Any:
    """The Keras package that an optimizer, a model or a layer belongs to; tf.keras when it can't be told."""
    for cls in type(thing).__mro__:
        root = cls.__module__.split(".", 1)[0]
        if root in ("keras", "tf_keras") and root in sys.modules:
            return sys.modules[root]
    return tf.keras


def is_keras_3(keras: Any) -> bool:
    """True for Keras 3 and later; False for tf_keras and for the Keras 2 of TensorFlow 2.15."""
    version = getattr(keras, "__version__", None) or getattr(keras, "version", lambda: "2")()
    return int(str(version).split(".", 1)[0]) >= 3


def loss_scale_class_of_tf_keras(keras: Any, optimizer: object) -> Any:
    """The class that tf-keras's ``LossScaleOptimizer(optimizer)`` is: one for legacy optimizers, one for the others.

    What is exported chooses between the two, and can't be given methods in a subclass.
    """
    module = sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]
    legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
    return module.LossScaleOptimizer if legacy else module.LossScaleOptimizerV3


def tensorflow_version() -> str:
    """For messages."""
    return str(tf.__version__)


def estimator_module() -> Any:
    """``tf.compat.v1.estimator`` in TensorFlow 2.15; None from 2.16 on, which dropped it."""
    return getattr(tf.compat.v1, "estimator", None)


def session_backend() -> Any:
    """The Keras backend that knows sessions (``get_session``, ``set_session``).

    That of tf-keras, where tf.keras is Keras 2; under Keras 3 the one inside TensorFlow, which models don't use.
    """
    backend = tf.compat.v1.keras.backend
    if hasattr(backend, "set_session"):
        return backend
    from tensorflow.python.keras import backend as inside_tensorflow

    return inside_tensorflow
