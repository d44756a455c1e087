"""The options: names, types, defaults, allowed values, and what they do here.

Source: Ascend TF Adapter 2.x API reference, ``npu.global_options``, which says what they mean on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rule:
    """The declaration of an option."""

    name: str
    effect: str  # what it does here, for the documentation page
    # Value if nothing was assigned; None means unset, and then any type may be assigned.
    default: Any = None
    allowed: tuple = ()  # the values that may be assigned; empty means any
    between: tuple[int, int] | None = None  # smallest and largest number that may be assigned
    # A bool may be assigned too and becomes the text ``"true"`` or ``"false"``.
    bool_words: bool = False
    is_deprecated: bool = False  # assigning it logs a warning

    def checked(self, path: str, value: Any) -> Any:
        """Return the value in the form in which it is kept; TypeError or ValueError if it isn't allowed."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None and self.default is None:
            return None
        if self.bool_words and isinstance(value, bool):
            value = str(value).lower()
        if self.default is not None and not isinstance(value, type(self.default)):
            raise TypeError(
                f"option {path!r} takes a value of type {type(self.default).__name__} "
                f"(default {self.default!r}); found {value!r} of type {type(value).__name__}"
            )
        # True is accepted where 1 is, as on Ascend; the integer is kept.
        if self.allowed:
            if value not in self.allowed:
                listed = ", ".join(map(repr, self.allowed))
                raise self._not_allowed(path, value, f"one of {listed}")
            # The listed value is kept, which has the listed type: True becomes 1.
            return self.allowed[self.allowed.index(value)]
        if self.between and not self.between[0] <= value <= self.between[1]:
            raise self._not_allowed(path, value, f"{self.between[0]} to {self.between[1]}")
        if type(self.default) is int:
            return int(value)
        return value

    @staticmethod
    def _not_allowed(path: str, value: Any, expected: str) -> ValueError:
        return ValueError(
            f"option {path!r} can't be {value!r} (of type {type(value).__name__}); expected {expected}"
        )


@dataclass(frozen=True)
class Section:
    """A named group of options and of further groups."""

    name: str
    declarations: tuple[Rule | Section, ...]

    def rules(self, prefix: str = "") -> list[tuple[str, Rule]]:
        """Return all options, those of further groups too, each with its path."""
        rules = []
        for declaration in self.declarations:
            path = prefix + declaration.name
            if isinstance(declaration, Section):
                rules += declaration.rules(path + ".")
            else:
                rules.append((path, declaration))
        return rules


# The reasons why options have no effect, one for each kind of option.
_COMPILER = "No effect: there is no NPU compiler."
_MEMORY = "No effect: TensorFlow manages the memory."
_PRECISION = (
    "No effect: tensors keep their dtypes. For mixed precision use `tf.keras.mixed_precision`."
)
_TIMEOUT = "No effect: there are no NPU streams to wait for."
_TUNING = "No effect: there are no NPU kernels to tune."
_TRACE = "Works for `training_trace`, see [tracing.md](tracing.md). Set it before `npu.open()`."
_DUMP = "No effect: use `tf.debugging`."
_DEPLOY = "No effect: the model is not split across devices."
_DEBUG = "No effect: there is no NPU compiler or device to debug."

_DETERMINISM = "No effect: call `tf.config.experimental.enable_op_determinism()` in the script."
_OVERFLOW = "No effect: numbers overflow to infinity, which `tf.math.is_finite` detects."
_AOE = "No effect: 4 logs a warning. [Compare splits](faster.md#tune-the-gradient-split) instead."

_PROFILING_OPTIONS = (
    '{"output":"./","training_trace":"on","task_time":"on","hccl":"on","aicpu":"on",'
    '"aic_metrics":"PipeUtilization","msproftx":"off"}'
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _rules(effect: str, names: str) -> tuple[Rule, ...]:
    """Return the declarations of options that take any value."""
    return tuple(Rule(name, effect) for name in _words(names))


_PRECISIONS = _words(
    "force_fp32 allow_fp32_to_fp16 force_fp16 must_keep_origin_dtype allow_mix_precision cube_fp16in_fp32out "
    "allow_mix_precision_fp16 allow_mix_precision_bf16 allow_fp32_to_bf16"
)
_PRECISIONS_2 = _words(
    "fp16 origin cube_fp16in_fp32out mixed_float16 mixed_bfloat16 cube_hif8 mixed_hif8"
)
GRAPH_MEMORY_OPTIMIZE_CONFIG = Section(
    "graph_memory_optimize_config",
    (
        Rule("recompute", _MEMORY, allowed=("auto", "manual")),
        Rule("graph_slice", _MEMORY, allowed=("auto",)),
    ),
)

_SHAPE, _DIMS = _rules(_COMPILER, "input_shape dynamic_dims")
_NODE_TYPE = Rule("dynamic_node_type", _COMPILER, default="0")
_CLUSTER = Rule("logical_device_cluster_deploy_mode", _DEPLOY, allowed=("LB", "SINGLE"))
_DEPLOY_CONFIG = (_CLUSTER, Rule("logical_device_id", _DEPLOY))
_MODEL_DEPLOY_CONFIG = _rules(_DEPLOY, "model_deploy_mode model_deploy_devicelist")
_EXPERIMENTAL = Section(
    "experimental",
    (
        Section("multi_branches_config", (_SHAPE, _NODE_TYPE, _DIMS)),
        Section("logical_device_deploy_config", _DEPLOY_CONFIG),
        Section("model_deploy_config", _MODEL_DEPLOY_CONFIG),
        GRAPH_MEMORY_OPTIMIZE_CONFIG,
        *_rules(_DEPLOY, "resource_config_path graph_parallel_option_path enable_graph_parallel"),
    ),
)
_PROFILING_CONFIG = (
    Rule("enable_profiling", _TRACE, default=False),
    Rule("profiling_options", _TRACE, default=_PROFILING_OPTIONS),
)
_AOE_CONFIG = (
    Rule("aoe_mode", _AOE, allowed=("1", "2", "4")),
    Rule("work_path", _TUNING, default="./"),
    Rule("aoe_config_file", _TUNING),
)
_DUMP_MODES = ("input", "output", "all")
_OVERFLOWS = ("aicore_overflow", "atomic_overflow", "all")
_DUMP_CONFIG = (
    Rule("enable_dump", _DUMP, default=False),
    *_rules(_DUMP, "dump_path dump_step"),
    Rule("dump_mode", _DUMP, default="output", allowed=_DUMP_MODES),
    Rule("enable_dump_debug", _DUMP, default=False),
    Rule("dump_debug_mode", _DUMP, default="all", allowed=_OVERFLOWS),
    Rule("dump_data", _DUMP, default="tensor", allowed=("tensor", "stats")),
    Rule("dump_layer", _DUMP),
)
_MEMORY_CONFIG = (
    Rule("atomic_clean_policy", _MEMORY, default=0, allowed=(0, 1)),
    Rule("static_memory_policy", _MEMORY, default=0, allowed=(0, 1, 2, 3, 4)),
    Rule("variable_use_1g_huge_page", _MEMORY, default=0, allowed=(0, 1, 2)),
)
_HCOM_PARALLEL = Rule(
    "hcom_parallel",
    "Works: with `False`, no gradient is sent before all are ready. Set it before a function is traced, and before an "
    "optimizer is wrapped.",
    default=True,
)
_TRAINING = (
    Rule("graph_run_mode", _COMPILER, default=1, allowed=(0, 1)),
    *_rules(_MEMORY, "graph_memory_max_size variable_memory_max_size"),
    Rule("precision_mode", _PRECISION, allowed=_PRECISIONS),
    Rule("precision_mode_v2", _PRECISION, allowed=_PRECISIONS_2),
    *_rules(_PRECISION, "modify_mixlist customize_dtypes op_precision_mode"),
    Rule("deterministic", _DETERMINISM, default=0, allowed=(0, 1)),
    Rule("overflow_flag", _OVERFLOW, default=1, allowed=(0, 1)),
    _HCOM_PARALLEL,
    Rule("hcom_multi_mode", "No effect: it concerns collectives of the NPU."),
    Rule("is_tailing_optimization", "No effect: results are the same.", default=False),
)
_TIMEOUTS = (
    Rule("graph_exec_timeout", _TIMEOUT),
    Rule("stream_sync_timeout", _TIMEOUT, default=-1),
    Rule("event_sync_timeout", _TIMEOUT, default=-1),
)
_CACHE_MODES = ("enable", "disable", "force")
_CACHE_MODE = Rule("op_compiler_cache_mode", _COMPILER, default="enable", allowed=_CACHE_MODES)
_JIT_COMPILE = Rule(
    "jit_compile",
    "No effect: `tf.function(jit_compile=True)` turns XLA on. A bool (older releases) becomes the string.",
    default="auto",
    allowed=("true", "false", "auto"),
    bool_words=True,
)
_COMPILING = (
    Rule("fusion_switch_file", _COMPILER),
    _CACHE_MODE,
    Rule("op_compiler_cache_dir", _COMPILER),
    *_rules(_DEBUG, "op_debug_config debug_dir"),
    Rule("enable_exception_dump", _DEBUG, default=2, allowed=(0, 1, 2)),
    Rule("enable_small_channel", _COMPILER, default=False),
    _JIT_COMPILE,
    Rule("topo_sorting_mode", _COMPILER, allowed=(0, 1)),
)
_SHAPE_MODES = ("STRICT", "FULL", "ADAPTIVE")
_SHAPE_MODE = Rule("shape_generalization_mode", _COMPILER, default="STRICT", allowed=_SHAPE_MODES)
_STREAMS_AND_CACHE = (
    "stream_max_parallel_num aicore_num graph_compiler_cache_dir enable_scope_fusion_passes"
)
_OPTIMIZING = (
    Rule("input_fusion_size", _MEMORY, default=131072, between=(0, 33554432)),
    Rule("export_compile_stat", _COMPILER, default=1, allowed=(0, 1, 2)),
    _SHAPE_MODE,
    Rule("oo_level", _COMPILER, default="O3", allowed=("O0", "O1", "O2", "O3")),
    Rule("oo_constant_folding", _COMPILER, default=True),
    Rule("optimization_switch", _COMPILER),
    Rule("ac_parallel_enable", _COMPILER, allowed=("0", "1")),
    Rule("quant_dumpable", _DUMP, allowed=("0", "1")),
    Rule("external_weight", _COMPILER, default=False),
    Rule("compile_dynamic_mode", _COMPILER, default=False),
    Rule("input_batch_cpy", _MEMORY, default=False),
    Rule("all_tensor_not_empty", _COMPILER, default=False),
    Rule("execute_times", _COMPILER, default=-1),
    *_rules(_COMPILER, _STREAMS_AND_CACHE),
    Rule("auto_multistream_parallel_mode", _COMPILER),
)
_DEPRECATED = (
    Rule("variable_format_optimize", _COMPILER, is_deprecated=True),
    Rule("op_debug_level", _DEBUG, allowed=(0, 1, 2, 3, 4), is_deprecated=True),
    Rule("op_select_implmode", _PRECISION, is_deprecated=True),
    Rule("optypelist_for_implmode", _PRECISION, is_deprecated=True),
)

# Messages and the documentation list the options in this order.
GLOBAL_OPTIONS = Section(
    "global_options",
    (
        *_TRAINING,
        *_TIMEOUTS,
        Section("profiling_config", _PROFILING_CONFIG),
        Section("aoe_config", _AOE_CONFIG),
        Section("dump_config", _DUMP_CONFIG),
        *_COMPILING,
        Section("memory_config", _MEMORY_CONFIG),
        *_OPTIMIZING,
        _EXPERIMENTAL,
        *_DEPRECATED,
        Rule("auto_tune_mode", _TUNING),
    ),
)
