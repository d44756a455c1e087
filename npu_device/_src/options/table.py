"""The options: names, types, defaults, allowed values, and what they do here.

Source: Ascend TF Adapter 2.x API reference, ``npu.global_options``, which says what they mean on an NPU.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rule:
    """The declaration of an option."""

    path: str  # name, after the names of its groups
    effect: str  # what it does here, for the documentation page
    # Value if nothing was assigned; None means unset, and then any type may be assigned.
    default: Any
    allowed: tuple  # the values that may be assigned; empty means any
    between: tuple[int, int] | None  # smallest and largest number that may be assigned
    is_deprecated: bool  # assigning it logs a warning

    def checked(self, value: Any) -> Any:
        """Return the value in the form in which it is kept; TypeError or ValueError if it isn't allowed."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None and self.default is None:
            return None
        # The texts of a bool were a bool in older releases.
        if isinstance(value, bool) and "true" in self.allowed:
            value = str(value).lower()
        if self.default is not None and not isinstance(value, type(self.default)):
            raise TypeError(
                f"option {self.path!r} takes a value of type {type(self.default).__name__} "
                f"(default {self.default!r}); found {value!r} of type {type(value).__name__}"
            )
        # True is accepted where 1 is, as on Ascend; the integer is kept.
        if value in self.allowed:
            return self.allowed[self.allowed.index(value)]
        if self.allowed:
            listed = ", ".join(map(repr, self.allowed))
            raise self._not_allowed(value, f"one of {listed}")
        if self.between and not self.between[0] <= value <= self.between[1]:
            raise self._not_allowed(value, f"{self.between[0]} to {self.between[1]}")
        if type(self.default) is int:
            return int(value)
        return value

    def _not_allowed(self, value: Any, expected: str) -> ValueError:
        return ValueError(
            f"option {self.path!r} can't be {value!r} (of type {type(value).__name__}); expected {expected}"
        )


_EFFECTS = {
    "parallel": (
        "Works: with `False`, no gradient is sent before all are ready. Set it before a function is traced, and "
        "before an optimizer is wrapped."
    ),
    "trace": "Works for `training_trace`, see [tracing.md](tracing.md). Set it before `npu.open()`.",
    "compiler": "No effect: there is no NPU compiler.",
    "memory": "No effect: TensorFlow manages the memory.",
    "precision": "No effect: tensors keep their dtypes. For mixed precision use `tf.keras.mixed_precision`.",
    "timeout": "No effect: there are no NPU streams to wait for.",
    "tuning": "No effect: there are no NPU kernels to tune.",
    "dump": "No effect: use `tf.debugging`.",
    "deploy": "No effect: the model is not split across devices.",
    "debug": "No effect: there is no NPU compiler or device to debug.",
    "determinism": "No effect: call `tf.config.experimental.enable_op_determinism()` in the script.",
    "overflow": "No effect: numbers overflow to infinity, which `tf.math.is_finite` detects.",
    "collectives": "No effect: it concerns collectives of the NPU.",
    "same": "No effect: results are the same.",
    "aoe": "No effect: 4 logs a warning. [Compare splits](faster.md#tune-the-gradient-split) instead.",
    "xla": "No effect: `tf.function(jit_compile=True)` turns XLA on. A bool (older releases) becomes the string.",
}
_BETWEEN = {"input_fusion_size": (0, 33554432)}
_DEPRECATED = "variable_format_optimize op_debug_level op_select_implmode optypelist_for_implmode"
# Effect, path, default, and the allowed values if not all are.
_TABLE = """
compiler    graph_run_mode                            1        0 1
memory      graph_memory_max_size                     None
memory      variable_memory_max_size                  None
precision   precision_mode                            None     \
    force_fp32 allow_fp32_to_fp16 force_fp16 must_keep_origin_dtype allow_mix_precision cube_fp16in_fp32out \
    allow_mix_precision_fp16 allow_mix_precision_bf16 allow_fp32_to_bf16
precision   precision_mode_v2                         None     \
    fp16 origin cube_fp16in_fp32out mixed_float16 mixed_bfloat16 cube_hif8 mixed_hif8
precision   modify_mixlist                            None
precision   customize_dtypes                          None
precision   op_precision_mode                         None
determinism deterministic                             0        0 1
overflow    overflow_flag                             1        0 1
parallel    hcom_parallel                             True
collectives hcom_multi_mode                           None
same        is_tailing_optimization                   False
timeout     graph_exec_timeout                        None
timeout     stream_sync_timeout                       -1
timeout     event_sync_timeout                        -1
trace       profiling_config.enable_profiling         False
trace       profiling_config.profiling_options        \
    '{"output":"./","training_trace":"on","task_time":"on","hccl":"on","aicpu":"on",\
"aic_metrics":"PipeUtilization","msproftx":"off"}'
aoe         aoe_config.aoe_mode                       None     '1' '2' '4'
tuning      aoe_config.work_path                      ./
tuning      aoe_config.aoe_config_file                None
dump        dump_config.enable_dump                   False
dump        dump_config.dump_path                     None
dump        dump_config.dump_step                     None
dump        dump_config.dump_mode                     output   input output all
dump        dump_config.enable_dump_debug             False
dump        dump_config.dump_debug_mode               all      aicore_overflow atomic_overflow all
dump        dump_config.dump_data                     tensor   tensor stats
dump        dump_config.dump_layer                    None
compiler    fusion_switch_file                        None
compiler    op_compiler_cache_mode                    enable   enable disable force
compiler    op_compiler_cache_dir                     None
debug       op_debug_config                           None
debug       debug_dir                                 None
debug       enable_exception_dump                     2        0 1 2
compiler    enable_small_channel                      False
xla         jit_compile                               auto     true false auto
compiler    topo_sorting_mode                         None     0 1
memory      memory_config.atomic_clean_policy         0        0 1
memory      memory_config.static_memory_policy        0        0 1 2 3 4
memory      memory_config.variable_use_1g_huge_page   0        0 1 2
memory      input_fusion_size                         131072
compiler    export_compile_stat                       1        0 1 2
compiler    shape_generalization_mode                 STRICT   STRICT FULL ADAPTIVE
compiler    oo_level                                  O3       O0 O1 O2 O3
compiler    oo_constant_folding                       True
compiler    optimization_switch                       None
compiler    ac_parallel_enable                        None     '0' '1'
dump        quant_dumpable                            None     '0' '1'
compiler    external_weight                           False
compiler    compile_dynamic_mode                      False
memory      input_batch_cpy                           False
compiler    all_tensor_not_empty                      False
compiler    execute_times                             -1
compiler    stream_max_parallel_num                   None
compiler    aicore_num                                None
compiler    graph_compiler_cache_dir                  None
compiler    enable_scope_fusion_passes                None
compiler    auto_multistream_parallel_mode            None
compiler    experimental.multi_branches_config.input_shape None
compiler    experimental.multi_branches_config.dynamic_node_type '0'
compiler    experimental.multi_branches_config.dynamic_dims None
deploy      experimental.logical_device_deploy_config.logical_device_cluster_deploy_mode None     LB SINGLE
deploy      experimental.logical_device_deploy_config.logical_device_id None
deploy      experimental.model_deploy_config.model_deploy_mode None
deploy      experimental.model_deploy_config.model_deploy_devicelist None
memory      experimental.graph_memory_optimize_config.recompute None     auto manual
memory      experimental.graph_memory_optimize_config.graph_slice None     auto
deploy      experimental.resource_config_path         None
deploy      experimental.graph_parallel_option_path   None
deploy      experimental.enable_graph_parallel        None
compiler    variable_format_optimize                  None
debug       op_debug_level                            None     0 1 2 3 4
precision   op_select_implmode                        None
precision   optypelist_for_implmode                   None
tuning      auto_tune_mode                            None
"""


def _value(word: str) -> Any:
    """Return the value that a word of the table is in Python, or else the word itself."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _rule(line: str) -> Rule:
    effect, path, *words = line.split()
    default, *allowed = map(_value, words)
    return Rule(
        path=path,
        effect=_EFFECTS[effect],
        default=default,
        allowed=tuple(allowed),
        between=_BETWEEN.get(path),
        is_deprecated=path in _DEPRECATED.split(),
    )


# Messages and the documentation list the options in this order.
RULES = tuple(map(_rule, _TABLE.strip().splitlines()))
