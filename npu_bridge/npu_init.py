"""``from npu_bridge.npu_init import *``: every name of Ascend's TensorFlow 1 adapter, and the modules that scripts take
from it without importing them (``tf``, ``np``, ``os``, ``RewriterConfig`` …). ``tf`` is ``tensorflow.compat.v1``: the
scripts are in the style of TensorFlow 1, and the import often stands after their own.
"""

# ruff: noqa: F401, F403

import os

import numpy as np
import tensorflow.compat.v1 as tf

from hccl.manage.api import *
from hccl.split.api import *
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
from npu_bridge.estimator.npu.npu_callbacks import *
from npu_bridge.estimator.npu.npu_config import *
from npu_bridge.estimator.npu.npu_estimator import *
from npu_bridge.estimator.npu.npu_hook import *
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import *
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    KerasDistributeOptimizer as npu_keras_optimizer,
    NPUDistributedOptimizer,
    NPUDistributedOptimizer as npu_tf_optimizer,
    NPUOptimizer,
    npu_allreduce,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from npu_bridge.hccl import hccl_ops
from npu_bridge.npu_cpu import npu_cpu_ops
from npu_device._src.compat import config_pb2, rewriter_config_pb2, session, session_run_hook
from npu_device._src.tf1.config import (
    RewriterConfig,
    backend,
    experimental_options,
    npu_clear_session,
    npu_config_proto,
    npu_graph_options,
    npu_optimizer_options,
    npu_session_config_init,
    set_keras_session_npu_config,
)
from npu_device._src.tf1.hooks import npu_hooks_append
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
