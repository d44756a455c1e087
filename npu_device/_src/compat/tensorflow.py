"""The private parts of TensorFlow's runtime that the package uses: the eager context, tapes, threads, the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# Scripts take config_pb2, rewriter_config_pb2, session and session_run_hook from the adapter's star import.
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2, tensorflow_server_pb2  # noqa: F401
from tensorflow.python.client import _pywrap_events_writer, session

# In ``eager_mode``, a thread runs eagerly also after ``tf.compat.v1.disable_v2_behavior()``. The context has no public
# counterpart for collective ops over several processes and for idle threads; nothing public asks what tapes record.
from tensorflow.python.eager import context as _context
from tensorflow.python.eager.context import context as eager_context, eager_mode  # noqa: F401
from tensorflow.python.eager.polymorphic_function import polymorphic_function as _function
from tensorflow.python.eager.record import (
    could_possibly_record as a_tape_records,  # noqa: F401
    record_operation,  # noqa: F401
    should_record_backprop as are_recorded,  # noqa: F401
)
from tensorflow.python.framework import kernels as _kernels
from tensorflow.python.lib.io import _pywrap_file_io
from tensorflow.python.ops import summary_ops_v2 as _summary_ops_v2
from tensorflow.python.training import session_run_hook  # noqa: F401

from npu_device._src.compat.live_objects import live_objects, with_subclasses

do_not_convert = tf.autograph.experimental.do_not_convert


def file_functions() -> dict[str, Any]:
    """Return the modules below ``tf.io.gfile`` and the summaries, of which Keras and hooks use other public forms."""
    return {"gfile": _pywrap_file_io, "summary": _summary_ops_v2, "events": _pywrap_events_writer}


def random_state() -> tuple[int | None, Any]:
    """Return TensorFlow's global seed, and the state of eager operations without a seed of their own."""
    current = _context.context()
    if current._seed is None:
        return None, None
    return current._seed, current._rng.getstate()


def set_random_state(state: tuple[int | None, Any]) -> None:
    seed, position = state
    # Setting the seed starts the state anew, so that the position is set after it.
    tf.random.set_seed(seed)
    if position is not None:
        _context.context()._rng.setstate(position)


def is_function(value: Any) -> bool:
    """Return True for what ``tf.function`` makes."""
    return isinstance(value, _function.Function)


def reduced_function(function: Any) -> tuple[Callable[..., Any], tuple]:
    """Return what makes the same function without graphs in a different process, and its arguments."""
    return tf.function, (
        function.python_function,
        function.input_signature,
        function._autograph,
        function._jit_compile,
        function._reduce_retracing,
    )


def to_tensor(value: Any) -> tf.Tensor:
    """Return a value as a tensor.

    TensorFlow keeps 0.7 KB forever for each new Python number that becomes a tensor in eager mode, but not for a list
    of numbers (2.20; ROCm/tensorflow-upstream#1149 explains it). Can go when it doesn't.
    """
    # A list of one number is converted, for which TensorFlow keeps nothing.
    if isinstance(value, (int, float, complex)) and tf.executing_eagerly():
        return tf.reshape(tf.convert_to_tensor([value]), [])
    return tf.convert_to_tensor(value)


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Return an eager tensor as an array. ``np.asarray`` refuses a bfloat16 scalar (TensorFlow 2.20). Can go when
    it doesn't.
    """
    if tensor.shape.rank:
        return np.asarray(tensor)
    return np.array(tensor.numpy(), tensor.dtype.as_numpy_dtype)


def bytes_of_tensor(tensor: tf.Tensor) -> memoryview:
    """Return the bytes of an eager tensor; not a copy if it is in the memory of the host."""
    flat = np.ascontiguousarray(to_array(tensor)).reshape(-1)
    return flat.view(np.uint8).data


def tensor_of_bytes(content: bytearray | memoryview, dtype: Any, shape: Any) -> tf.Tensor:
    """Return the tensor whose bytes ``bytes_of_tensor`` has given."""
    flat = np.frombuffer(content, tf.as_dtype(dtype).as_numpy_dtype)
    return tf.constant(flat.reshape(tuple(shape)), dtype)


def context_is_initialized() -> bool:
    """Return True if TensorFlow has made its devices, after which nothing can be configured."""
    current = _context.context_safe()
    return current is not None and current._context_handle is not None


def let_idle_threads_sleep() -> None:
    """Let the threads that TensorFlow is going to make sleep when idle; by default they use a core to look for work."""
    # Without this question, TensorFlow would take the visible GPUs from the configuration below.
    tf.config.get_visible_devices()
    sleepy = config_pb2.ConfigProto.Experimental(disable_thread_spinning=True)
    _context.context()._config = config_pb2.ConfigProto(experimental=sleepy)


def renew_context_of_graphs() -> None:
    """Replace TensorFlow's context if eager mode is switched off for the whole process.

    Building a graph with a dataset makes a context, only to register functions that the graph holds as well, and
    afterwards the collective runtime can't be configured any more. Nothing else lives in such a context.
    """
    if _context.default_execution_mode == _context.GRAPH_MODE and context_is_initialized():
        # The switches hold which graphs the threads are in: a script may build one in ``with graph.as_default()``, and
        # leaves it later.
        switches = _context.context()._context_switches
        _context._reset_context()
        _context.context()._context_switches = switches


def server_def(cluster: dict[str, list[str]], job: str, task: int, port: int, config: Any) -> Any:
    """Return the protobuf that starts TensorFlow's gRPC server inside the eager context."""
    cluster_def = tf.train.ClusterSpec(cluster).as_cluster_def()
    return tensorflow_server_pb2.ServerDef(
        cluster=cluster_def,
        default_session_config=config,
        job_name=job,
        task_index=task,
        protocol="grpc",
        port=port,
    )


def has_nccl() -> bool:
    """Return True if TensorFlow is built with NCCL. It has no public way to ask."""
    return bool(_kernels.get_registered_kernels_for_op("NcclAllReduce").kernel)


def estimator_module() -> Any:
    """Return ``tf.compat.v1.estimator`` in TensorFlow 2.15; None from 2.16 on, which dropped it. Can go with 2.15."""
    return getattr(tf.compat.v1, "estimator", None)


def number_of(tensor: Any) -> int:
    """Return the number of an eager tensor; of two, the one that was made later has the larger one."""
    return int(tensor._id)


def is_trackable(candidate: Any) -> bool:
    """Return True for what ``tf.train.Checkpoint`` takes besides lists and dicts. The class isn't public."""
    return hasattr(candidate, "_trackable_children")


def warm_start_of(estimator: Any) -> Any:
    """Return the settings with which an Estimator of a Keras model starts from its weights. Can go with 2.15."""
    return estimator._warm_start_settings


class _Folder(str):
    """A folder that TensorFlow takes for equal to one around it, when it compares what an Estimator is given."""

    def __ne__(self, folder: object) -> bool:
        return not self.startswith(str(folder))


class _WithFolder:
    """Base of a ``RunConfig`` whose folder a function chooses."""

    _choose: Callable[[str], str]
    _folder: str | None

    # The attribute to which TensorFlow assigns the folder that an Estimator is given, on a copy.
    @property
    def _model_dir(self) -> str | None:
        return self._folder

    @_model_dir.setter
    def _model_dir(self, folder: str | None) -> None:
        self._folder = folder
        if folder is not None:
            self._folder = _Folder(self._choose(folder))


def set_folder(config: Any, choose: Callable[[str], str]) -> None:
    """Let an Estimator with a ``RunConfig`` write to the folder that a function returns for its own. Can go with 2.15.

    The function is a plain one, since TensorFlow copies the configuration with all that it refers to.
    """
    folder = vars(config).pop("_model_dir")
    config._choose = choose
    config.__class__ = type("RunConfig", (_WithFolder, type(config)), {})
    config._model_dir = folder


def has_folder(config: Any) -> bool:
    """Return True for a ``RunConfig`` that ``set_folder`` has changed. Can go with 2.15."""
    return isinstance(config, _WithFolder)


def lines_of_stack(frame: Any) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of a Python frame and of its callers, innermost first.

    For code rewritten by AutoGraph, these are the lines that the user wrote: the function that calls such code has its
    map from lines to lines (TensorFlow 2.15 to 2.21). ``tf_stack`` knows it as well, but ends the process if a path
    isn't ASCII while Python isn't in UTF-8 mode (TensorFlow 2.20).
    """
    rewritten = []
    while frame is not None:
        code = frame.f_code
        if "__autograph_generated_file" in code.co_filename:
            rewritten.append((code.co_filename, frame.f_lineno))
        elif rewritten and code.co_name == "converted_call":
            origins = getattr(frame.f_locals.get("converted_f"), "ag_source_map", {})
            for origin in filter(None, map(origins.get, rewritten)):
                yield origin.loc.filename, origin.loc.lineno, origin.function_name
            rewritten.clear()
        else:
            yield code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back


def open_sessions(graph: Any) -> list:
    """Return the sessions of TensorFlow 1 in this process that run a graph; some may have been closed."""
    # Sessions and interactive ones have no public class in common.
    classes = set(with_subclasses([session.BaseSession]))
    return [candidate for candidate in live_objects(classes) if candidate.graph is graph]
