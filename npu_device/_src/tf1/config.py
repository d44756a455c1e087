"""Session configurations with Ascend's custom optimizer "NpuOptimizer", and which of its parameters become options.

TensorFlow skips custom optimizers that it doesn't know, and its own graph optimizers run as usual.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import job
from npu_device._src.options import global_options
from npu_device._src.training.opening import device

RewriterConfig = compat.rewriter_config_pb2.RewriterConfig

_NAME = "NpuOptimizer"

# The parameters that become options: the field that holds the value, and the matching option.
_OPTIONS = {
    "hcom_parallel": ("b", "hcom_parallel"),
    "profiling_mode": ("b", "profiling_config.enable_profiling"),
    "profiling_options": ("s", "profiling_config.profiling_options"),
    "aoe_mode": ("s", "aoe_config.aoe_mode"),
    "work_path": ("s", "aoe_config.work_path"),
    "aoe_config_file": ("s", "aoe_config.aoe_config_file"),
}

_REWRITES = (
    "function_optimization constant_folding shape_optimization arithmetic_optimization loop_optimization "
    "dependency_optimization layout_optimizer"
)
experimental_options: dict[str, Any] = {
    "disable_model_pruning": False,
    **dict.fromkeys(_REWRITES.split(), RewriterConfig.ON),
}
"""Ascend's table of what its compiler leaves to TensorFlow. Changing it has no effect here."""


def npu_session_config_init(session_config: Any = None) -> Any:
    """Return a session configuration with the custom optimizer "NpuOptimizer", which is added once.

    Args:
        session_config: a ``tf.compat.v1.ConfigProto``, which is changed; anything else counts as a new one. Parameters
            of the optimizer for collectives, tracing and tuning become options. If the job is open, settings that it
            leaves out are the GPU and the threads of this rank.

    Raises:
        ValueError, TypeError: a parameter that is read has a value that ``npu.global_options()`` refuses.

    Source: Ascend TF Adapter 1.x, ``npu_session_config_init``.
    """
    if not isinstance(session_config, tf.compat.v1.ConfigProto):
        session_config = tf.compat.v1.ConfigProto()
    rewrites = session_config.graph_options.rewrite_options
    rewrites.remapping = RewriterConfig.OFF
    rewrites.memory_optimization = RewriterConfig.OFF
    if _optimizer_of(session_config) is None:
        rewrites.custom_optimizers.add().name = _NAME
    copy_parameters(session_config)
    add_resources(session_config)
    return session_config


def npu_config_proto(config_proto: Any = None) -> Any:
    """Return a configuration as of ``npu_session_config_init``, with soft placement on, placement log and XLA off.

    Args:
        config_proto: a ``tf.compat.v1.ConfigProto``, which is changed; anything else counts as a new one.

    >>> config = npu_config_proto()
    >>> [optimizer.name for optimizer in config.graph_options.rewrite_options.custom_optimizers]
    ['NpuOptimizer']

    Source: Ascend TF Adapter 1.x, ``npu_config_proto``.
    """
    config_proto = npu_session_config_init(config_proto)
    config_proto.allow_soft_placement = True
    config_proto.log_device_placement = False
    npu_optimizer_options(config_proto.graph_options.optimizer_options)
    return config_proto


def npu_optimizer_options(optimizer_options: Any = None) -> Any:
    """Return ``tf.compat.v1.OptimizerOptions`` with XLA switched off.

    Args:
        optimizer_options: the options, which are changed; anything else is replaced by new ones.

    Source: Ascend TF Adapter 1.x, ``npu_optimizer_options``.
    """
    if not isinstance(optimizer_options, tf.compat.v1.OptimizerOptions):
        optimizer_options = tf.compat.v1.OptimizerOptions()
    optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.OFF
    return optimizer_options


def npu_graph_options(graph_options: Any = None) -> Any:
    """Return ``tf.compat.v1.GraphOptions`` with XLA switched off.

    Args:
        graph_options: the options, which are changed; anything else is replaced by new ones.

    Source: Ascend TF Adapter 1.x, ``npu_graph_options``.
    """
    if not isinstance(graph_options, tf.compat.v1.GraphOptions):
        graph_options = tf.compat.v1.GraphOptions()
    npu_optimizer_options(graph_options.optimizer_options)
    return graph_options


class SessionConfigBuilder:
    """Builds a session configuration from parameters of "NpuOptimizer".

    Args:
        config: a ``tf.compat.v1.ConfigProto``, which is changed; anything else counts as a new one.

    Attributes:
        parameter_map: the parameters; ``builder.parameter_map["hcom_parallel"].b = False``.

    Source: Ascend TF Adapter 2.x, ``npu.compat.v1.SessionConfigBuilder``.
    """

    def __init__(self, config: Any = None) -> None:
        self._config = npu_session_config_init(config)
        self._config.allow_soft_placement = True
        self.parameter_map = _optimizer_of(self._config).parameter_map

    @property
    def session_config(self) -> Any:
        """Return the configuration, and apply the parameters set so far."""
        copy_parameters(self._config)
        add_resources(self._config)
        return self._config


def decorator_tf_session(make_session: Callable) -> Callable:
    """Return a function or class that receives its argument ``config`` as ``npu_config_proto`` returns it.

    Args:
        make_session: the function or class.

    >>> make_session = decorator_tf_session(tf.compat.v1.Session)

    Source: Ascend TF Adapter 1.x, ``npu_config.decorator_tf_session``.
    """
    signature = inspect.signature(make_session)

    @functools.wraps(make_session)
    def with_npu_config(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        # The script may have passed ``config`` by position.
        bound.arguments["config"] = config_of_session(bound.arguments.get("config"))
        return make_session(*bound.args, **bound.kwargs)

    return with_npu_config


def config_of_session(config: Any = None) -> Any:
    """Return ``npu_config_proto(config)`` for a session that is made now, and would take all GPUs without a job."""
    config = npu_config_proto(config)
    # Opened after the parameters have become options, which can't change any more then.
    device.unless_child()
    add_resources(config)
    return config


def add_resources(config: Any) -> None:
    """Set what a configuration leaves out to the GPU and the threads of this rank, if its job is open. TensorFlow
    itself gives them only to sessions without a configuration.
    """
    if job.current() is None:
        return
    eager_config = compat.eager_context().config
    for section, eager_section, name in (
        (config, eager_config, "intra_op_parallelism_threads"),
        (config, eager_config, "inter_op_parallelism_threads"),
        (config.experimental, eager_config.experimental, "disable_thread_spinning"),
        (config.gpu_options, eager_config.gpu_options, "visible_device_list"),
        (config.gpu_options, eager_config.gpu_options, "allow_growth"),
    ):
        if not getattr(section, name):
            setattr(section, name, getattr(eager_section, name))


def copy_parameters(config: Any) -> None:
    """Copy the parameters of "NpuOptimizer" that become options, if it has them, to ``npu.global_options()``."""
    optimizer = _optimizer_of(config)
    if optimizer is None:
        return
    parameters = optimizer.parameter_map
    for key, (field, _) in _OPTIONS.items():
        if key in parameters:
            setting = getattr(parameters[key], field)
            if isinstance(setting, bytes):
                # Protocol buffers keep text as bytes in this field.
                setting = setting.decode()
            set_option(key, setting)


def set_option(key: str, setting: Any) -> None:
    """Assign a parameter to its counterpart in ``npu.global_options()``, if it has one.

    None and the empty text, Ascend's way to ask for the default, change nothing.
    """
    if key not in _OPTIONS or setting is None or setting == "":
        return
    *groups, name = _OPTIONS[key][1].split(".")
    # A key of Ascend may name an option in a group.
    options = functools.reduce(getattr, groups, global_options())
    # Assigning after npu.open() logs a warning, which would be wrong when nothing changes.
    if getattr(options, name).typed != setting:
        setattr(options, name, setting)


def _optimizer_of(config: Any) -> Any:
    optimizers = config.graph_options.rewrite_options.custom_optimizers
    return next((optimizer for optimizer in optimizers if optimizer.name == _NAME), None)


backend = compat.session_backend()
"""The Keras backend that scripts take from the star import. Keras 3 has no sessions: there it is that of the Keras
inside TensorFlow, which ``tf.keras`` models don't use.
"""


def set_keras_session_npu_config(config: Any = None) -> Any:
    """Return a session with ``npu_config_proto(config)``, which Keras uses from now on.

    Args:
        config: a ``tf.compat.v1.ConfigProto``, which is changed; anything else counts as a new one.

    Raises:
        RuntimeError: the job can't be joined, as in ``npu.open``.

    Source: Ascend TF Adapter 1.x, ``set_keras_session_npu_config``.
    """
    # A session needs a graph, also in eager mode.
    with tf.compat.v1.get_default_graph().as_default():
        session = tf.compat.v1.Session(config=config_of_session(config))
    backend.set_session(session)
    return session


def npu_clear_session(config: Any = None) -> None:
    """Drop Keras's graph and session, and give it a new session with ``npu_config_proto(config)``.

    Args:
        config: a ``ConfigProto`` or None.

    Raises:
        RuntimeError: the job can't be joined, as in ``npu.open``.

    Source: Ascend TF Adapter 1.x, ``npu_clear_session``.
    """
    backend.clear_session()
    set_keras_session_npu_config(config)
