"""Short names that no test of their feature calls, on 1, 2 and 3 ranks; every public function is named in a test."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from collective_bodies import wrong_refusals
from pool import Pool
from public_names import kept

import npu_device as npu
from npu_bridge import npu_init
from npu_bridge.estimator import npu_ops
from npu_bridge.estimator.npu import npu_plugin, util
from npu_bridge.estimator.npu.npu_config import DynamicInputConfig, MemoryConfig
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook
from npu_device import configs, gen_npu_ops
from npu_device.distribute import npu_callbacks


def body_operators() -> None:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    sent = tf.range(size) + 10 * rank
    ones, places = [1] * size, list(range(size))
    received = [rank + 10 * sender for sender in range(size)]
    by_counts = gen_npu_ops.hcom_all_to_all_v(sent, ones, places, ones, places)
    assert by_counts.numpy().tolist() == received
    by_matrix = gen_npu_ops.hcom_all_to_all_vc(sent, [ones] * size, rank)
    assert by_matrix.numpy().tolist() == received
    assert not wrong_refusals(
        ("NotImplementedError", "all_to_all_v", gen_npu_ops.embedding_rank_id, sent),
        ("NotImplementedError", "gather", gen_npu_ops.hcom_gather_all_to_all_v, *[sent] * 6),
        ("NotImplementedError", "send", gen_npu_ops.hcom_remote_read, sent, tf.int32),
        ("NotImplementedError", "receive", gen_npu_ops.hcom_remote_ref_read, *[sent] * 3),
        ("NotImplementedError", "send", gen_npu_ops.hcom_remote_write, sent, sent, tf.int32),
        ("NotImplementedError", "send", gen_npu_ops.hcom_remote_scatter_write, *[sent] * 3),
    )
    assert gen_npu_ops.p_relu([-2.0, 2.0], 0.5).numpy().tolist() == [-1.0, 2.0]
    for status in (gen_npu_ops.npu_alloc_float_status_v2, gen_npu_ops.npu_clear_float_status_v2):
        assert status().dtype == tf.int32 and not np.any(status())

    weight, gradient = tf.constant([3.0, 4.0]), tf.constant([1.0, 0.0])
    one_layer = npu_ops.LARSV2(weight, gradient, 0.1, 1.0)
    [of_list] = gen_npu_ops.lars([weight], [gradient], 0.1)
    np.testing.assert_array_equal(one_layer, of_list)

    x, gamma = tf.constant([[1.0, 2.0, 4.0]]), tf.ones([3])
    normalized, mean, variance = gen_npu_ops.layer_norm(x, gamma, tf.zeros([3]), 1, 1)
    slopes = gen_npu_ops.layer_norm_grad(tf.ones([1, 3]), x, variance, mean, gamma)
    # A shift of all numbers of a row changes nothing, so that the first gradient is zero.
    for found, expected in zip(slopes, ([[0.0] * 3], normalized[0], [1.0] * 3)):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def body_training() -> None:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    handle = npu.open()
    assert isinstance(handle, npu.NpuDeviceHandle) and handle.worker_id == rank
    npu_plugin.npu_resource_init(graph_run_mode=1)  # the device is open: nothing happens
    assert util.get_ranksize() == size

    variable = tf.Variable(float(rank))
    npu_callbacks.broadcast_helper([variable], size - 1)
    assert float(variable) == size - 1
    begin = tf.keras.initializers.Constant(rank)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer=begin)])
    model.build([None, 1])
    npu_callbacks.broadcast_keras_model(model, size - 1)
    assert float(model.get_weights()[0][0, 0]) == size - 1

    for wrap in (npu_init.npu_keras_optimizer, npu_init.KerasDistributeOptimizer):
        trained = tf.Variable(0.0)
        wrap(tf.keras.optimizers.SGD(1.0)).apply_gradients([(tf.constant(float(rank)), trained)])
        assert float(trained) == -(size - 1) / 2


def body_sessions() -> None:
    v1, rank, size = tf.compat.v1, npu.distribute.rank(), npu.distribute.size()
    with tempfile.TemporaryDirectory() as directory, tf.Graph().as_default() as graph:
        weight = v1.get_variable("weight", initializer=float(rank + 1))
        step = v1.train.get_or_create_global_step()
        optimizer = npu_init.npu_tf_optimizer(v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(weight * rank, global_step=step)
        util.keep_tensors_dtypes(graph, [weight])
        saver = NPUCheckpointSaverHook(directory, save_steps=1, saver=v1.train.Saver())
        hooks = npu_init.npu_hooks_append([saver])
        assert len(npu_init.npu_hooks_append()) == 1
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            util.npu_compile(session, train)
            session.run(train)
        v1.summary.FileWriterCache.clear()  # the hook writes a summary of each checkpoint
        saved = tf.train.load_checkpoint(directory).get_tensor("weight")
        # All ranks begin with rank 0's 1.0, and subtract the mean of the ranks' numbers.
        assert float(saved) == 1 - (size - 1) / 2


@pytest.mark.parametrize("body", [body_operators, body_training, body_sessions])
def test_names_of_ascend(ranks: Pool, body: Any) -> None:
    ranks.run(body)


def body_horovod() -> None:
    import npu_device.horovod.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert hvd.is_initialized() and hvd.gloo_built() and hvd.gloo_enabled()
    without = (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported)
    assert not any(call() for call in (*without, hvd.ccl_built, hvd.ddl_built))
    assert isinstance(hvd.nccl_built(), (bool, int))
    assert hvd.cuda_built() is tf.test.is_built_with_cuda()
    assert hvd.rocm_built() is tf.test.is_built_with_rocm()

    own = tf.constant([rank, -rank])
    assert hvd.allreduce(own, op=hvd.Max).numpy().tolist() == [size - 1, 0]
    assert hvd.allreduce(own, op=hvd.Min).numpy().tolist() == [0, 1 - size]
    first, both = hvd.grouped_allgather([own[:1], own])
    assert first.numpy().tolist() == list(range(size))
    assert both.numpy().tolist() == [number for other in range(size) for number in (other, -other)]
    rows, more_rows = hvd.grouped_reducescatter([tf.range(size), tf.ones([size, 2])], op=hvd.Sum)
    assert rows.numpy().tolist() == [rank * size]
    assert more_rows.numpy().tolist() == [[size, size]]


def test_names_of_horovod(ranks: Pool) -> None:
    ranks.run(body_horovod)


def test_records_and_checks() -> None:
    memory = MemoryConfig(static_memory_policy=2)
    assert memory.static_memory_policy == 2 and memory.memory_optimization_policy is None
    assert DynamicInputConfig("x:-1", "1;2", 1).compile_hybrid_mode is None
    assert isinstance(configs.run_context_options(), configs.RunContextOptions)
    util.check_aoe_mode("2")
    with pytest.raises(ValueError, match="'1', '2' or '4'"):
        util.check_aoe_mode("3")


def test_every_public_function_is_named_in_a_test() -> None:
    words: set[str] = set()
    for path in Path(__file__).parent.rglob("*.py"):
        words.update(re.findall(r"\w+", path.read_text()))
    missing = []
    for name, parameters in kept().items():
        owner, _, leaf = name.rpartition(".")
        # Options have "()" in their names, methods a class before them: tests of their owners cover both.
        is_function = parameters is not None and "(" not in name
        is_function = is_function and not owner.rpartition(".")[2][:1].isupper()
        if is_function and leaf not in words:
            missing.append(name)
    assert not missing, "call these names in a test: " + ", ".join(missing)
