"""The table of options: names, types, defaults, allowed values, and their meaning on an NPU and here.

Source: Ascend TF Adapter 2.x API reference, ``npu.global_options``.
"""

from __future__ import annotations

from npu_device._src.options.option import Rule, Section

# The reasons why options have no effect, one for each kind of option.
_COMPILER = "No effect: there is no NPU compiler."
_MEMORY = "No effect: TensorFlow manages the memory."
_PRECISION = "No effect: tensors keep their dtypes. For mixed precision use `tf.keras.mixed_precision`."
_TIMEOUT = "No effect: there are no NPU streams to wait for."
_TUNING = "No effect: there are no NPU kernels to tune."
_TRACE = "Works for `training_trace`, see [tracing.md](tracing.md). Set it before `npu.open()`."
_DUMP = "No effect: use `tf.debugging`."
_DEPLOY = "No effect: the model is not split across devices."
_DEBUG = "No effect: there is no NPU compiler or device to debug."

_PROFILING_OPTIONS = (
    '{"output":"./","training_trace":"on","task_time":"on","hccl":"on","aicpu":"on",'
    '"aic_metrics":"PipeUtilization","msproftx":"off"}'
)

GRAPH_MEMORY_OPTIMIZE_CONFIG = Section(
    "graph_memory_optimize_config",
    (
        Rule("recompute", "recompute activations instead of keeping them", _MEMORY, allowed=("auto", "manual")),
        Rule("graph_slice", "cut the graph into slices to save memory", _MEMORY, allowed=("auto",)),
    ),
)

_EXPERIMENTAL = Section(
    "experimental",
    (
        Section(
            "multi_branches_config",
            (
                Rule("input_shape", "shapes of the inputs, -1 where they vary", _COMPILER),
                Rule("dynamic_node_type", "kind of the nodes with varying shapes", _COMPILER, default="0"),
                Rule("dynamic_dims", "the sizes to compile for", _COMPILER),
            ),
        ),
        Section(
            "logical_device_deploy_config",
            (
                Rule(
                    "logical_device_cluster_deploy_mode",
                    "how the model is laid out on logical devices",
                    _DEPLOY,
                    allowed=("LB", "SINGLE"),
                ),
                Rule("logical_device_id", "the logical device for SINGLE", _DEPLOY),
            ),
        ),
        Section(
            "model_deploy_config",
            (
                Rule("model_deploy_mode", "how models are laid out", _DEPLOY),
                Rule("model_deploy_devicelist", "the devices for it", _DEPLOY),
            ),
        ),
        GRAPH_MEMORY_OPTIMIZE_CONFIG,
        Rule("resource_config_path", "file that describes the devices", _DEPLOY),
        Rule("graph_parallel_option_path", "file with options for splitting the graph", _DEPLOY),
        Rule("enable_graph_parallel", "split the graph across devices", _DEPLOY),
    ),
)

GLOBAL_OPTIONS = Section(
    "global_options",
    (
        Rule("graph_run_mode", "0 inference, 1 training", _COMPILER, default=1, allowed=(0, 1)),
        Rule("graph_memory_max_size", "bytes for the graph, as a string; no effect there either", _MEMORY),
        Rule("variable_memory_max_size", "bytes for variables, as a string; no effect there either", _MEMORY),
        Rule(
            "precision_mode",
            "dtypes the compiler may change",
            _PRECISION,
            allowed=(
                "force_fp32",
                "allow_fp32_to_fp16",
                "force_fp16",
                "must_keep_origin_dtype",
                "allow_mix_precision",
                "cube_fp16in_fp32out",
                "allow_mix_precision_fp16",
                "allow_mix_precision_bf16",
                "allow_fp32_to_bf16",
            ),
        ),
        Rule(
            "precision_mode_v2",
            "newer form of precision_mode; use one of the two",
            _PRECISION,
            allowed=(
                "fp16",
                "origin",
                "cube_fp16in_fp32out",
                "mixed_float16",
                "mixed_bfloat16",
                "cube_hif8",
                "mixed_hif8",
            ),
        ),
        Rule("modify_mixlist", "JSON file: operators that mixed precision may change", _PRECISION),
        Rule("customize_dtypes", "file: dtypes of individual operators", _PRECISION),
        Rule("op_precision_mode", "file: precise or fast form of individual operators", _PRECISION),
        Rule(
            "deterministic",
            "1: the same result in every run",
            "No effect: call `tf.config.experimental.enable_op_determinism()` in the script.",
            default=0,
            allowed=(0, 1),
        ),
        Rule(
            "overflow_flag",
            "1: detect overflow",
            "No effect: numbers overflow to infinity, which `tf.math.is_finite` detects.",
            default=1,
            allowed=(0, 1),
        ),
        Rule(
            "hcom_parallel",
            "reduce gradients while backward still runs",
            "Works: with `False`, no gradient is sent before all are ready. Set it before a function is traced, and "
            "before an optimizer is wrapped.",
            default=True,
        ),
        Rule("hcom_multi_mode", "a mode of the collectives", "No effect: it concerns collectives of the NPU."),
        Rule(
            "is_tailing_optimization",
            "check for overflow before the last gradient is reduced",
            "No effect: results are the same.",
            default=False,
        ),
        Rule("graph_exec_timeout", "longest run of a graph, ms", _TIMEOUT),
        Rule("stream_sync_timeout", "longest wait for a stream, ms; -1: no limit", _TIMEOUT, default=-1),
        Rule("event_sync_timeout", "longest wait for an event, ms; -1: no limit", _TIMEOUT, default=-1),
        Section(
            "profiling_config",
            (
                Rule("enable_profiling", "trace the training", _TRACE, default=False),
                Rule("profiling_options", "what to trace, JSON", _TRACE, default=_PROFILING_OPTIONS),
            ),
        ),
        Section(
            "aoe_config",
            (
                Rule(
                    "aoe_mode",
                    "what to tune: 1 subgraphs, 2 kernels, 4 gradient split",
                    "No effect: 4 logs a warning. [Compare splits](tuning.md) instead.",
                    allowed=("1", "2", "4"),
                ),
                Rule("work_path", "directory for files of the tuner", _TUNING, default="./"),
                Rule("aoe_config_file", "file with settings of the tuner", _TUNING),
            ),
        ),
        Section(
            "dump_config",
            (
                Rule("enable_dump", "dump tensors", _DUMP, default=False),
                Rule("dump_path", "directory for the dump", _DUMP),
                Rule("dump_step", "steps to dump, such as `3-5`", _DUMP),
                Rule("dump_mode", "which tensors", _DUMP, default="output", allowed=("input", "output", "all")),
                Rule("enable_dump_debug", "dump when an operator overflows", _DUMP, default=False),
                Rule(
                    "dump_debug_mode",
                    "which overflows",
                    _DUMP,
                    default="all",
                    allowed=("aicore_overflow", "atomic_overflow", "all"),
                ),
                Rule("dump_data", "whole tensors or statistics", _DUMP, default="tensor", allowed=("tensor", "stats")),
                Rule("dump_layer", "names of the operators to dump", _DUMP),
            ),
        ),
        Rule("fusion_switch_file", "file: which operator fusions are on", _COMPILER),
        Rule(
            "op_compiler_cache_mode",
            "keep compiled operators on disk",
            _COMPILER,
            default="enable",
            allowed=("enable", "disable", "force"),
        ),
        Rule("op_compiler_cache_dir", "where to keep them", _COMPILER),
        Rule("op_debug_config", "file: memory checks of operators", _DEBUG),
        Rule("debug_dir", "directory for intermediate files of the compiler", _DEBUG),
        Rule("enable_exception_dump", "dump operators that fail", _DEBUG, default=2, allowed=(0, 1, 2)),
        Rule("enable_small_channel", "faster form for few channels", _COMPILER, default=False),
        Rule(
            "jit_compile",
            "compile operators while running",
            "No effect: `tf.function(jit_compile=True)` turns XLA on. A bool (older releases) becomes the string.",
            default="auto",
            allowed=("true", "false", "auto"),
            bool_words=True,
        ),
        Rule("topo_sorting_mode", "order of the graph: 0 breadth first, 1 depth first", _COMPILER, allowed=(0, 1)),
        Section(
            "memory_config",
            (
                Rule(
                    "atomic_clean_policy", "clear memory at once or piece by piece", _MEMORY, default=0, allowed=(0, 1)
                ),
                Rule("static_memory_policy", "static or growing memory", _MEMORY, default=0, allowed=(0, 1, 2, 3, 4)),
                Rule("variable_use_1g_huge_page", "huge pages for variables", _MEMORY, default=0, allowed=(0, 1, 2)),
            ),
        ),
        Rule(
            "input_fusion_size",
            "bytes up to which inputs are copied together",
            _MEMORY,
            default=131072,
            between=(0, 33554432),
        ),
        Rule("export_compile_stat", "when to write compiler statistics", _COMPILER, default=1, allowed=(0, 1, 2)),
        Rule(
            "shape_generalization_mode",
            "how varying shapes are compiled",
            _COMPILER,
            default="STRICT",
            allowed=("STRICT", "FULL", "ADAPTIVE"),
        ),
        Rule("oo_level", "optimisation level", _COMPILER, default="O3", allowed=("O0", "O1", "O2", "O3")),
        Rule("oo_constant_folding", "fold constants", _COMPILER, default=True),
        Rule("optimization_switch", "individual optimisations on or off", _COMPILER),
        Rule("ac_parallel_enable", "AI CPU operators in parallel with AI Core ones", _COMPILER, allowed=("0", "1")),
        Rule("quant_dumpable", "dump data from before quantisation", _DUMP, allowed=("0", "1")),
        Rule("external_weight", "weights in separate files", _COMPILER, default=False),
        Rule("compile_dynamic_mode", "compile for varying shapes", _COMPILER, default=False),
        Rule("input_batch_cpy", "copy all inputs at once", _MEMORY, default=False),
        Rule("all_tensor_not_empty", "promise: no tensor is empty", _COMPILER, default=False),
        Rule("execute_times", "number of executions", _COMPILER, default=-1),
        Rule("stream_max_parallel_num", "parallel streams", _COMPILER),
        Rule("aicore_num", "AI cores to use", _COMPILER),
        Rule("graph_compiler_cache_dir", "where compiled graphs are kept", _COMPILER),
        Rule("enable_scope_fusion_passes", "fusion passes to run", _COMPILER),
        Rule("auto_multistream_parallel_mode", "spread operators over streams", _COMPILER),
        _EXPERIMENTAL,
        Rule("variable_format_optimize", "NPU layout for variables", _COMPILER, deprecated=True),
        Rule("op_debug_level", "files the operator compiler keeps", _DEBUG, allowed=(0, 1, 2, 3, 4), deprecated=True),
        Rule("op_select_implmode", "precise or fast operators", _PRECISION, deprecated=True),
        Rule("optypelist_for_implmode", "operators to which op_select_implmode applies", _PRECISION, deprecated=True),
        Rule("auto_tune_mode", "tuner of 2021 and 2022, usually `RL,GA`; removed later", _TUNING),
    ),
)
