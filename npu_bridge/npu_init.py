"""``from npu_bridge.npu_init import *``: every name of Ascend's TensorFlow 1 adapter, and the modules that scripts take
from it without importing them (``tf``, ``np``, ``os``, ``RewriterConfig`` …). ``tf`` is ``tensorflow.compat.v1``: the
scripts are in the style of TensorFlow 1, and the import often stands after their own.
"""

import os

import numpy as np
import tensorflow.compat.v1 as tf

from hccl.manage.api import (
    create_group,
    destroy_group,
    get_group_rank_from_world_rank,
    get_local_rank_id,
    get_local_rank_size,
    get_rank_id,
    get_rank_size,
    get_world_rank_from_group_rank,
)
from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
from npu_bridge import profiler
from npu_bridge.estimator import npu_ops
from npu_bridge.estimator.npu import (
    keras_to_npu,
    npu_plugin,
    npu_rnn,
    npu_scope,
    npu_strategy,
    scoped_graph_manager,
    util,
)
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_config import (
    DumpConfig,
    DynamicInputConfig,
    MemoryConfig,
    NPURunConfig,
    ProfilingConfig,
    decorator_tf_session,
)
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import (
    NPUBroadcastGlobalVariablesHook,
    NPUCheckpointSaverHook,
    NpuEmptyHook,
    SetIterationsVarHook,
)
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_allreduce,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer as npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer as npu_tf_optimizer
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from npu_bridge.hccl import hccl_ops
from npu_bridge.npu_cpu import npu_cpu_ops
from npu_device._src.compat import config_pb2, rewriter_config_pb2, session, session_run_hook
from npu_device._src.tf1.config import (
    RewriterConfig,
    experimental_options,
    npu_config_proto,
    npu_graph_options,
    npu_optimizer_options,
    npu_session_config_init,
)
from npu_device._src.tf1.hooks import npu_hooks_append
from npu_device._src.tf1.keras_session import backend, npu_clear_session, set_keras_session_npu_config
from npu_device._src.tf1.run_config import npu_run_config_init
from npu_device._src.tf1.system import (
    close_session,
    get_npu_local_rank_id,
    get_npu_local_rank_size,
    get_npu_rank_id,
    get_npu_rank_size,
    init_resource,
    shutdown_resource,
)
from npu_device.distribute.hccl import npu_callbacks_append

__all__ = [
    "DumpConfig",
    "DynamicInputConfig",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "KerasDistributeOptimizer",
    "MemoryConfig",
    "NPUBroadcastGlobalVariablesCallback",
    "NPUBroadcastGlobalVariablesHook",
    "NPUCheckpointSaverHook",
    "NPUDistributedOptimizer",
    "NPUEstimator",
    "NPUEstimatorSpec",
    "NPULossScaleOptimizer",
    "NPUOptimizer",
    "NPURunConfig",
    "NpuEmptyHook",
    "ProfilingConfig",
    "RewriterConfig",
    "SetIterationsVarHook",
    "backend",
    "close_session",
    "config_pb2",
    "create_group",
    "decorator_tf_session",
    "destroy_group",
    "experimental_options",
    "get_group_rank_from_world_rank",
    "get_local_rank_id",
    "get_local_rank_size",
    "get_npu_local_rank_id",
    "get_npu_local_rank_size",
    "get_npu_rank_id",
    "get_npu_rank_size",
    "get_rank_id",
    "get_rank_size",
    "get_world_rank_from_group_rank",
    "hccl_ops",
    "init_resource",
    "keras_to_npu",
    "np",
    "npu_allreduce",
    "npu_callbacks_append",
    "npu_clear_session",
    "npu_config_proto",
    "npu_cpu_ops",
    "npu_distributed_optimizer_wrapper",
    "npu_graph_options",
    "npu_hooks_append",
    "npu_keras_optimizer",
    "npu_ops",
    "npu_optimizer_options",
    "npu_plugin",
    "npu_rnn",
    "npu_run_config_init",
    "npu_scope",
    "npu_session_config_init",
    "npu_strategy",
    "npu_tf_optimizer",
    "npu_unary_ops",
    "os",
    "profiler",
    "rewriter_config_pb2",
    "scoped_graph_manager",
    "session",
    "session_run_hook",
    "set_keras_session_npu_config",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "shutdown_resource",
    "tf",
    "util",
]
