"""Every import statement that public scripts use resolves, with a process for each tree; the star import brings the
names that scripts take from it, and does nothing else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import public_names
import test_docs_names
from launcher import environment
from pool import Pool

import npu_device

# Beside the star imports of npu_init, which _star_import has.
STATEMENTS = """\
from npu_bridge.estimator.npu import *
from npu_bridge import *
from npu_bridge.npu_cpu.lru_cache import *
from npu_bridge.estimator import npu_ops, npu_aicore_ops
from npu_bridge.estimator.npu.npu_config import NPURunConfig, DumpConfig, ProfilingConfig, NpuExecutePlacement
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, allreduce, NPUOptimizer
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.hccl import hccl_ops
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager, ExponentialUpdateLossScaleManager
from hccl.manage.api import get_rank_size, get_rank_id, get_local_rank_id, create_group, get_local_rank_size
from npu_bridge.estimator.npu import npu_scope, npu_loss_scale_manager as lsm_lib, util
from npu_bridge.estimator.npu import npu_loss_scale_optimizer, npu_hook, npu_convert_dropout, npu_plugin
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
from npu_device import gen_npu_ops
from npu_bridge.estimator.npu.npu_dynamic_rnn import DynamicRNN, DynamicGRUV2, DynamicAUGRU
from npu_bridge.npu_cpu.npu_cpu_ops import embeddingrankid
from npu_bridge import tf_adapter
from npu_device.npu_device import gen_npu_ops as npu_aicore_ops, global_npu_ctx
from npu_bridge.npu_cpu import npu_cpu_ops as custom_op
from npu_bridge.tbe.npu_cube_ops import deformable_conv2d
from npu_device.compat.v1.estimator import npu_ops
from npu_bridge.tbe import npu_vector_ops
from npu_bridge.helper import helper
from npu_bridge.experimental.hccl import get_actual_rank_size, get_user_rank_id, get_user_rank_size
from npu_bridge.estimator.npu_ops import dropout as ops_dropout
from npu_bridge.estimator.npu_aicore_ops import npu_aicore_ops
from npu_device.compat.v1.estimator.npu.npu_optimizer import npu_distributed_optimizer_wrapper
from npu_device.compat.v1.hccl import hccl_ops
from npu_device.compat.v1 import SessionConfigBuilder
from npu_device.compat import enable_v1
from npu_device.distribute.hccl import npu_distributed_keras_optimizer_wrapper
from npu_device.distribute import hccl_ops
from npu_device.train import npu_convert
from npu_device.train.optimizer import NpuLossScaleOptimizer
from npu_device.utils.scope import keep_dtype_scope
"""

STAR_NAMES = set(
    re.findall(r"^npu_bridge\.npu_init\.(\w+)$", "\n".join(public_names.kept()), re.MULTILINE)
)


def _star_import(module: str, before: str) -> str:
    return f"""
import threading, time
threads, began = threading.enumerate(), time.process_time()
scope = {{}}
exec({before!r}, scope)
exec("from {module} import *", scope)
seconds = time.process_time() - began
assert seconds < 2, seconds
names = {{name for name in scope if not name.startswith("__")}}
assert names == {STAR_NAMES!r}, names ^ {STAR_NAMES!r}
assert threading.enumerate() == threads
from npu_device._src import compat
assert not compat.context_is_initialized()
exec("assert tf.constant and np.zeros and os.environ and RewriterConfig.OFF", scope)
exec("assert tf.placeholder and tf.app.flags and tf.ConfigProto and tf.Session", scope)  # as in TensorFlow 1
"""


BOTH_TREES = """
import npu_device.compat.v1.estimator.npu.npu_config as compat, npu_bridge.estimator.npu.npu_config as bridge
from npu_device.compat import v1
for name in ("NPURunConfig", "DumpConfig", "decorator_tf_session"):
    assert getattr(bridge, name) is getattr(compat, name)
assert v1.SessionConfigBuilder().session_config.allow_soft_placement
"""
REACHED = [
    name for name, status in test_docs_names.NAMES if status == "works" and ".distribute." in name
]
TREES = ("npu_device", "npu_bridge", "hccl")
PROGRAMS = [
    "\n".join(["import npu_device", *(name for name in REACHED if name.startswith("npu_device."))]),
    # Imports go down only (test_floors.py), so that the order of the statements in a process doesn't matter.
    *("\n".join(re.findall(rf"^\w+ {tree}\b.*", STATEMENTS, re.MULTILINE)) for tree in TREES),
    _star_import("npu_bridge.npu_init", "import tensorflow as tf"),
    _star_import("npu_device.compat.v1.npu_init", ""),
    BOTH_TREES,
]

# Importing TensorFlow takes seconds: one process does, and forks for each program.
PARENT = """
import json, os, sys, traceback
import tensorflow
tensorflow.keras.optimizers  # loads Keras where that is late
for program in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        try:
            exec(program, {})
        except BaseException:
            print(program, traceback.format_exc(limit=-2), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print("the end")
"""


def test_each_program_runs_in_a_process_that_has_imported_nothing_of_the_package() -> None:
    assert len(REACHED) > 10
    done = subprocess.run(
        [sys.executable, "-c", PARENT],
        env=environment(),
        input=json.dumps(PROGRAMS),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "the end\n", done.stdout + done.stderr[-3000:]


def package() -> str:
    return npu_device.__file__


def test_processes_that_tests_start_import_the_package_of_the_tests(
    single: Pool, tmp_path: Path
) -> None:
    code = "import npu_device; print(npu_device.__file__)"
    for variables in (None, environment()):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{package()}\n"
    assert single.run(package) == [package()]
