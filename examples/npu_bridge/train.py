"""A training in TensorFlow 1 style, as Ascend's guide ports it: a session, a distributed optimizer, a broadcast hook.

npurun -n 2 examples/npu_bridge/train.py
"""
# ruff: noqa: F403, F405

import numpy as np
import tensorflow.compat.v1 as tf

from hccl.manage.api import get_rank_id, get_rank_size
from npu_bridge.npu_init import *

tf.disable_v2_behavior()
x, y = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None, 1])
weights = tf.get_variable("weights", [4, 1])
bias = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean((x @ weights + bias - y) ** 2)
step = tf.train.get_or_create_global_step()
optimizer = NPUDistributedOptimizer(
    tf.train.AdamOptimizer(0.1)
)  # takes the mean of the ranks' gradients
train = optimizer.minimize(loss, global_step=step)

random = np.random.default_rng(1)
hooks = [NPUBroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=200)]
with tf.train.MonitoredTrainingSession(hooks=hooks, config=npu_config_proto()) as session:
    while not session.should_stop():
        samples = random.normal(size=(48, 4))[
            get_rank_id() :: get_rank_size()
        ]  # each rank has samples of its own
        batch = {x: samples, y: samples.sum(axis=1, keepdims=True) + 1}
        _, learnt, offset = session.run([train, weights, bias], batch)
print(
    f"rank {get_rank_id()} of {get_rank_size()}: {learnt.ravel().round(2).tolist()}, {offset.round(2).tolist()}"
)
