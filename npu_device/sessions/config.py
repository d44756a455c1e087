"""Session configurations that carry Ascend's custom optimizer "NpuOptimizer", and which of its parameters count here.

TensorFlow passes over custom optimizers that it doesn't know: a session takes such a configuration, hand-made or not,
and its own graph optimizers run as ever. The parameters are therefore free to be there, and those of ``_OPTIONS`` are
read when a configuration comes through this module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_device._compat import rewriter_config_pb2
from npu_device.options import global_options

RewriterConfig = rewriter_config_pb2.RewriterConfig

_NAME = "NpuOptimizer"

# The parameters that mean something here: the field that holds the value, and the option that says the same.
_OPTIONS = {
    "hcom_parallel": ("b", "hcom_parallel"),
    "profiling_mode": ("b", "profiling_config.enable_profiling"),
    "profiling_options": ("s", "profiling_config.profiling_options"),
    "aoe_mode": ("s", "aoe_config.aoe_mode"),
    "work_path": ("s", "aoe_config.work_path"),
    "aoe_config_file": ("s", "aoe_config.aoe_config_file"),
}

experimental_options: dict[str, Any] = {
    "disable_model_pruning": False,
    "function_optimization": RewriterConfig.ON,
    "constant_folding": RewriterConfig.ON,
    "shape_optimization": RewriterConfig.ON,
    "arithmetic_optimization": RewriterConfig.ON,
    "loop_optimization": RewriterConfig.ON,
    "dependency_optimization": RewriterConfig.ON,
    "layout_optimizer": RewriterConfig.ON,
}
"""Ascend's table of what its compiler leaves to TensorFlow. Changing it has no effect here."""


def npu_session_config_init(session_config: Any = None) -> Any:
    """Give a session configuration the custom optimizer "NpuOptimizer", once.

    Args:
        session_config: a ``tf.compat.v1.ConfigProto``, which is changed; anything else counts as a new one.

    Returns:
        The configuration. Parameters of the optimizer that mean something here have their effect from now on, see
        ``take_parameters``.

    Raises:
        ValueError, TypeError: a parameter that is read has a value that ``npu.global_options()`` refuses.

    Other ranks see nothing of it.

    Source: Ascend TF Adapter 1.x, ``npu_session_config_init``.
    """
    if not isinstance(session_config, tf.compat.v1.ConfigProto):
        session_config = tf.compat.v1.ConfigProto()
    rewrites = session_config.graph_options.rewrite_options
    rewrites.remapping = RewriterConfig.OFF
    rewrites.memory_optimization = RewriterConfig.OFF
    if _optimizer_of(session_config) is None:
        rewrites.custom_optimizers.add().name = _NAME
    take_parameters(session_config)
    return session_config


def npu_config_proto(config_proto: Any = None) -> Any:
    """``npu_session_config_init``, with soft placement, and without the placement log and XLA.

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
    """Switch XLA off in ``tf.compat.v1.OptimizerOptions``; anything else counts as new ones. Returns them.

    Source: Ascend TF Adapter 1.x, ``npu_optimizer_options``.
    """
    if not isinstance(optimizer_options, tf.compat.v1.OptimizerOptions):
        optimizer_options = tf.compat.v1.OptimizerOptions()
    optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.OFF
    return optimizer_options


def npu_graph_options(graph_options: Any = None) -> Any:
    """Switch XLA off in ``tf.compat.v1.GraphOptions``; anything else counts as new ones. Returns them.

    Source: Ascend TF Adapter 1.x, ``npu_graph_options``.
    """
    if not isinstance(graph_options, tf.compat.v1.GraphOptions):
        graph_options = tf.compat.v1.GraphOptions()
    npu_optimizer_options(graph_options.optimizer_options)
    return graph_options


class SessionConfigBuilder:
    """Makes a session configuration from parameters of "NpuOptimizer".

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
        """The configuration; the parameters that were filled in until now have their effect."""
        take_parameters(self._config)
        return self._config


def decorator_tf_session(make_session: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that takes a session's ``config`` get it by way of ``npu_config_proto``.

    >>> make_session = decorator_tf_session(tf.compat.v1.Session)

    Source: Ascend TF Adapter 1.x, ``npu_config.decorator_tf_session``.
    """
    signature = inspect.signature(make_session)

    @functools.wraps(make_session)
    def with_npu_config(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.arguments["config"] = npu_config_proto(bound.arguments.get("config"))
        return make_session(*bound.args, **bound.kwargs)

    return with_npu_config


def take_parameters(config: Any) -> None:
    """Put those parameters of a configuration's "NpuOptimizer" that mean something here into ``npu.global_options()``.

    Args:
        config: a ``tf.compat.v1.ConfigProto``, with or without the optimizer. Parameters that it doesn't have change
            nothing.
    """
    optimizer = _optimizer_of(config)
    if optimizer is None:
        return
    parameters = optimizer.parameter_map
    for key, (field, _) in _OPTIONS.items():
        if key in parameters:
            value = getattr(parameters[key], field)
            set_option(key, value.decode() if isinstance(value, bytes) else value)


def set_option(key: str, value: Any) -> None:
    """Assign a parameter to the option of ``npu.global_options()`` that says the same.

    Args:
        key: the parameter; one that means nothing here is passed over.
        value: its value; None and the empty text, which is Ascend's way to ask for the usual, change nothing.
    """
    if key not in _OPTIONS or value is None or value == "":
        return
    *groups, name = _OPTIONS[key][1].split(".")
    options = functools.reduce(getattr, groups, global_options())
    # Assigning after npu.open() logs a warning, which is not due when nothing changes.
    if getattr(options, name).typed != value:
        setattr(options, name, value)


def _optimizer_of(config: Any) -> Any:
    """The custom optimizer "NpuOptimizer" of a configuration, or None."""
    optimizers = config.graph_options.rewrite_options.custom_optimizers
    return next((optimizer for optimizer in optimizers if optimizer.name == _NAME), None)
