"""Differences between TensorFlow and Keras releases, and the few private doors of TensorFlow that the package goes
through.

This is the only place that asks for a version or imports from ``tensorflow.python``. Everything else uses the names
below.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

# The eager context has no public counterpart for collective ops over several processes;
# tf.distribute.MultiWorkerMirroredStrategy goes through the same calls.
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.util import tf_stack as _tf_stack


def eager_context() -> Any:
    """The process's eager context (not created by this call)."""
    return _context.context()


def context_is_initialized() -> bool:
    """True when TensorFlow has made its devices and thread pools, after which nothing can be configured any more."""
    current = _context.context_safe()
    return current is not None and current._context_handle is not None


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


def plain_variable(initial_value: Any) -> Any:
    """A variable that no surrounding tf.distribute or Keras scope gets to see (tf.Variable goes through their
    creators).
    """
    return _resource_variable_ops.ResourceVariable(initial_value, trainable=False)


def stack() -> list[Any]:
    """The frames of the calling thread, outermost first (``filename``, ``lineno``, ``name``).

    Code that AutoGraph has rewritten shows the lines that the user wrote.
    """
    return list(_tf_stack.extract_stack())


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
