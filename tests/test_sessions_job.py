"""Whole scripts in TensorFlow 1 style, from start to exit."""

from __future__ import annotations

import re
from pathlib import Path

import job
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "npu_bridge" / "train.py"

# Datasets first, and no npu.open(): as scripts for TensorFlow 1 have it.
HEAD = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
from hccl.manage.api import get_rank_id, get_rank_size
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.hccl import hccl_ops

features = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
data = tf.data.Dataset.from_tensor_slices((features, features.sum(1, keepdims=True)))
data = data.map(lambda x, y: (x * 1.0, y)).repeat().batch(4)
iterator = tf.data.make_initializable_iterator(data)
tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
x, y = iterator.get_next()
rank, size = get_rank_id(), get_rank_size()
tf.set_random_seed(1 + rank)
with tf.variable_scope("net"):
    weights = tf.get_variable("weights", [3, 1])
    table = tf.get_variable("table", [6, 2])
rows = tf.nn.embedding_lookup(table, [rank, 3])
loss = tf.reduce_mean((x @ weights - y) ** 2) + tf.reduce_sum(rows**2)
everybodys = hccl_ops.allreduce(loss, "sum") / size
step = tf.train.get_or_create_global_step()
"""

TRAINING = (
    HEAD
    + """
import os
manager = ExponentialUpdateLossScaleManager(2**16, 1000, 2, decr_ratio=0.5)
optimizer = NPUDistributedOptimizer(tf.train.AdamOptimizer(0.05))
optimizer = NPULossScaleOptimizer(optimizer, manager, is_distributed=True)
train = optimizer.minimize(loss, global_step=step)
hooks = [NPUBroadcastGlobalVariablesHook(0, rank), tf.train.StopAtStepHook(last_step=int(os.environ["LAST_STEP"]))]
directory = os.environ["CHECKPOINTS"] if rank == 0 else None
losses = []
with tf.train.MonitoredTrainingSession(checkpoint_dir=directory, hooks=hooks) as session:
    begun = session.run(step)
    while not session.should_stop():
        _, value, learnt, learnt_rows = session.run([train, everybodys, weights, table])
        losses.append(float(value))
print("RESULT", begun, len(losses), losses[-1] < losses[0] / 2, learnt.ravel().tolist(), learnt_rows.ravel().tolist())
"""
)

PLAIN = "tf.train.AdamOptimizer(0.05)"
SHARDED = TRAINING.replace(PLAIN, f"{PLAIN}, is_weight_update_sharding=True")

# The job is joined inside a graph that isn't the default one, as in the model_fn of an Estimator.
OWN_GRAPH = """
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
from npu_bridge.npu_init import NPUDistributedOptimizer, npu_plugin

with tf.Graph().as_default():
    numbers = tf.data.make_one_shot_iterator(tf.data.Dataset.range(8).map(lambda number: number + 1)).get_next()
    weight = tf.get_variable("weight", initializer=1.0)
    optimizer = NPUDistributedOptimizer(tf.train.MomentumOptimizer(1.0, 0.5))
    train = optimizer.minimize(-weight * tf.cast(numbers, tf.float32))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        session.run(train)
        print("RESULT", session.run(weight))
assert tf.get_default_graph() is not weight.graph
npu_plugin.npu_resource_shutdown()
"""

FAILING = (
    HEAD
    + """
import time
from pathlib import Path
import npu_device as npu

saved = Path(__file__).with_name("saved")
train = NPUDistributedOptimizer(tf.train.GradientDescentOptimizer(0.1)).minimize(loss, global_step=step)
with tf.train.MonitoredTrainingSession() as session:
    for number in range(5):
        if number == 3 and rank == 1:
            raise ValueError("the disk of rank 1 is full")
        session.run([train, everybodys])
        if rank == 0:
            time.sleep(0.3)
            saved.write_text(str(number))
        npu.distribute.barrier()
        assert saved.read_text() == str(number)
        npu.distribute.barrier()
"""
)

# Rank 1 changes a variable alone: in a session that it closes itself, at the end of one with the hook, and in one that
# is open at the end of the job.
DRIFTING = """
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
from hccl.manage.api import get_rank_id
from npu_bridge.npu_init import NPUBroadcastGlobalVariablesHook, NPUDistributedOptimizer
from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables

def built():
    numbers = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices([0.5, 1.0]))
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, numbers.initializer)
    weight = tf.get_variable("net/weight", initializer=[1.0, 2.0])
    tf.get_variable("net/mean", initializer=float(get_rank_id()), trainable=False)
    optimizer = NPUDistributedOptimizer(tf.train.MomentumOptimizer(0.01, 0.5))
    train = optimizer.minimize(tf.reduce_sum(weight**2) * numbers.get_next())
    return train, weight.assign_add([1.0, 0.0]), tf.get_variable_scope(), numbers.initializer

with tf.Graph().as_default():
    train, change, _, again = built()
    send = broadcast_global_variables(0)
    for drifts in (False, True):
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), again])
            session.run(send)
            for step in range(9):
                try:
                    session.run(train)
                except tf.errors.OutOfRangeError:
                    session.run(again)  # this step counts on no rank
                if drifts and step == 7 and get_rank_id() == 1:
                    session.run(change)
            for _ in range(3):
                session.run(again)
                session.run(train)
            print("CLOSED", drifts, flush=True)
with tf.Graph().as_default():
    train, change, _, again = built()
    slot = next(variable for variable in tf.global_variables() if "Momentum" in variable.name)
    change_slot = slot.assign_add([1.0, 0.0])
    with tf.train.MonitoredTrainingSession(hooks=[NPUBroadcastGlobalVariablesHook(0)]) as session:
        session.run(train)
        if get_rank_id() == 1:
            session.run(change_slot)
print("ENDED", flush=True)
with tf.Graph().as_default():
    train, change, _, again = built()
    send = broadcast_global_variables(0)
    session = tf.Session()
    session.run([tf.global_variables_initializer(), again])
    session.run(send)
    session.run(train)
    if get_rank_id() == 1:
        session.run(change)
"""


def test_ranks_that_drift_apart_in_sessions_are_named(tmp_path: Path) -> None:
    outputs = job.outputs(tmp_path, 2, DRIFTING)
    # The last rank to post warns.
    texts = "\n".join(outputs)
    assert "begin training" not in texts
    assert texts.count("the ranks have drifted apart in a session") == 1
    drift = texts.split("the ranks have drifted apart in a session: ")[1]
    assert drift.startswith(
        "seen after step 7 (after step 4 they were equal), in 1 of 1 variables (net/weight:0):"
    )
    assert "rank 1" in drift and "broadcast_global_variables(0)" in drift
    assert "tf.control_dependencies([learning_rate])" in drift
    ends = texts.split("the ranks ended with different values for ")[1:]
    assert sorted(end.split(":\n")[0] for end in ends) == [
        "1 of 2 variables (net/weight/Momentum:0)",
        "1 of 2 variables (net/weight:0)",
    ]
    assert all("rank 1" in end and "broadcast_global_variables(0)" in end for end in ends)


@pytest.mark.slow
def test_the_example_finds_the_same_weights_on_both_ranks(tmp_path: Path) -> None:
    for rank, output in enumerate(job.outputs(tmp_path, 2, EXAMPLE.read_text())):
        assert f"rank {rank} of 2: [1.0, 1.0, 1.0, 1.0], [1.0]" in output


@pytest.mark.slow
def test_a_session_trains_and_goes_on_from_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    found = []
    for last in (20, 30):
        variables = {"LAST_STEP": str(last), "CHECKPOINTS": str(tmp_path / "checkpoints")}
        outputs = job.outputs(tmp_path, 2, TRAINING, **variables)
        assert not any("Traceback" in output or "Likely" in output for output in outputs)
        # The same result on all ranks.
        [result] = {
            line for output in outputs for line in output.splitlines() if line.startswith("RESULT")
        }
        found.append(result.split()[1:4])
    assert found[0] == ["0", "20", "True"] and found[1][:2] == ["20", "10"]


@pytest.mark.slow
def test_reference_variables_are_trained_by_shares_within_a_loss_scale(tmp_path: Path) -> None:
    variables = {"LAST_STEP": "20", "CHECKPOINTS": str(tmp_path / "checkpoints")}
    results = []
    for output in job.outputs(tmp_path, 2, SHARDED, **variables):
        assert "Likely" not in output
        results += re.findall("RESULT 0 20 True .*", output)
    assert len(results) == 2 and results[0] == results[1]


def test_a_job_is_joined_inside_a_graph(tmp_path: Path) -> None:
    for output in job.outputs(tmp_path, 2, OWN_GRAPH):
        assert "RESULT 4.5" in output  # 1 + 1 + (2 + 0.5 * 1)


def test_a_failing_rank_is_named_in_the_others_session(tmp_path: Path) -> None:
    first, second = job.run(tmp_path, 2, FAILING)
    assert first.code != 0 and second.code != 0
    assert "rank 1 on host" in first.output
    assert "the disk of rank 1 is full" in first.output
    assert first.at - second.at < 10
