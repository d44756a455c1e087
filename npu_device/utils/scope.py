"""Ascend's import path of the scopes that tag operations (``npu_device.utils.scope``)."""

from npu_device._src.no_effect.modes import (
    disable_autofuse as disable_autofuse,
    keep_dtype_scope as keep_dtype_scope,
    limit_core_num_scope as limit_core_num_scope,
    npu_gradients_scope as npu_gradients_scope,
    npu_graph_slice_scope as npu_graph_slice_scope,
    npu_mem_type_scope as npu_mem_type_scope,
    npu_optimizer_scope as npu_optimizer_scope,
    npu_qos_label_scope as npu_qos_label_scope,
    npu_recompute_scope as npu_recompute_scope,
    npu_stage_scope as npu_stage_scope,
    npu_variable_scope as npu_variable_scope,
    npu_weight_prefetch_scope as npu_weight_prefetch_scope,
    op_specified_engine_scope as op_specified_engine_scope,
    subgraph_multi_dims_scope as subgraph_multi_dims_scope,
    without_npu_compile_scope as without_npu_compile_scope,
)
