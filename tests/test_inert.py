"""Without distributed environment variables nothing happens: the same objects come back, and nothing is created."""

from __future__ import annotations

import sys
from pathlib import Path

import job
import pytest
from ranks import table_environment

SCRIPT = """
import os, threading
import tensorflow as tf

def state():
    return (
        sorted(thread.name for thread in threading.enumerate()),
        len(os.listdir("/proc/self/task")),
        sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if
        os.path.exists(f"/proc/self/fd/{fd}")), sorted(os.listdir(".")),
    )

before = state()
import npu_device as npu
from npu_device._src import compat
import numpy as np
from hccl.manage import api

handle = npu.open().as_default()
assert (handle.workers_num, handle.worker_id, handle.is_cluster_worker()) == (1, 0, False)
assert handle.name() == "/job:localhost/replica:0/task:0/device:NPU:0", handle.name()
assert npu.open() is npu.open(0) is handle
npu.global_options().precision_mode = "allow_mix_precision"

array, number, several = np.ones(3), 3.0, (np.ones(2), None)
for value in (array, number, several, None, [1]):
    assert npu.distribute.all_reduce(value) is value
    assert npu.distribute.all_reduce(value, "sum") is value
assert npu.distribute.broadcast([], 0) is None
api.create_group("a", 1, [0])
place = api.get_rank_size(), api.get_rank_id(), api.get_local_rank_size("a"), api.get_local_rank_id("a")
assert place == (1, 0, 1, 0)
thing = object()
assert npu.distribute.broadcast([thing], 0) is None
assert npu.distribute.npu_distributed_keras_optimizer_wrapper(thing) is thing
dataset, batch = npu.distribute.shard_and_rebatch_dataset(thing, np.int64(8))
assert dataset is thing and type(batch) is np.int64
assert not compat.context_is_initialized()
assert state() == before, (before, state())

optimizer = tf.keras.optimizers.SGD()
methods = dict(vars(optimizer))
assert npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer) is optimizer
assert vars(optimizer) == methods
model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
methods = dict(vars(model))
assert npu.distribute.replicate(model) is model
assert vars(model) == methods
data = tf.data.Dataset.range(2)
assert npu.distribute.divided(data) is data
value = {}
assert npu.distribute.broadcast_object(value) is value and npu.distribute.weighted_mean(value, 1) is value
npu.distribute.barrier()
tensor = tf.constant(1.0)
assert npu.distribute.all_reduce(tensor) is tensor
npu.close()
npu.close()
print("inert")
"""


@pytest.mark.parametrize("has_table", [False, True], ids=["alone", "table of one device"])
def test_the_same_objects_and_nothing_created(tmp_path: Path, has_table: bool) -> None:
    table = {**table_environment(tmp_path, 1, 0), "JOB_ID": "10087"} if has_table else {}
    [output] = job.outputs(
        tmp_path, 1, "import os\nos.chdir(os.path.dirname(__file__))\n" + SCRIPT, **table
    )
    assert "inert" in output


ALONE = """
import npu_device as npu
for call in (lambda: npu.distribute.all_reduce(1.0), npu.open, npu.close, npu.open):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_a_process_alone_names_misspelled_and_malformed_variables() -> None:
    variables = [{"NPU_DEVICE_AUDT": "off"}, {"NPU_DEVICE_STALL_TIMEOUT": "soon"}]
    misspelled, malformed = job.run_anew([[sys.executable, "-c", ALONE]] * 2, variables)
    assert misspelled.output.count("NPU_DEVICE_AUDT: did you mean NPU_DEVICE_AUDIT?") == 1
    message = "EI0001: the environment variable NPU_DEVICE_STALL_TIMEOUT is 'soon'"
    assert malformed.output.count(message) == 3


def test_the_level_of_the_logger(tmp_path: Path) -> None:
    script = "import logging, npu_device as npu; npu.open(); logging.getLogger('npu_device').info('said')"
    for level, times in (("INFO", 1), ("warning", 0)):
        [output] = job.outputs(tmp_path, 1, script, NPU_DEVICE_LOG_LEVEL=level)
        assert output.splitlines().count("said") == times
