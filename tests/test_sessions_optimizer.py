"""TensorFlow 1 optimizers over several ranks, loss scaling, and several steps in one run."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, settings
from collective_bodies import wrong_refusals
from pool import Pool

import npu_device as npu
from npu_bridge.experimental import hccl as experimental
from npu_device._src import compat
from npu_device._src.tf1 import distributed_optimizer as optimizers, hooks as all_hooks, system
from npu_device._src.tf1.distributed_optimizer import (
    ExponentialUpdateLossScaleManager,
    NPUDistributedOptimizer,
    NPULossScaleOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_device._src.tf1.hooks import SetIterationsVarHook, broadcast_global_variables
from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

STEPS, ROWS = 4, 12  # the rows shared by 1, 2 and 3 ranks


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(7)
    x = generator.normal(size=(ROWS, 3)).astype(np.float32)
    return x, (x @ np.array([[1.0], [-2.0], [0.5]], np.float32)).astype(np.float32)


def train(kind: str) -> dict[str, Any]:
    """A few steps on this rank's rows; the variables afterwards."""
    v1, size, rank = tf.compat.v1, npu.open().workers_num, npu.open().worker_id
    x, y = (array[rank::size] for array in data())

    def make(opt: Any) -> Any:
        if kind == "NPUOptimizer":
            manager = ExponentialUpdateLossScaleManager(8.0, 2)
            return optimizers.NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True)
        opt = NPUDistributedOptimizer(opt, is_weight_update_sharding="sharded" in kind)
        if "loss scale" in kind:
            return NPULossScaleOptimizer(
                opt, optimizers.FixedLossScaleManager(1024.0), is_distributed=size > 1
            )
        return opt

    with tf.Graph().as_default():
        v1.set_random_seed(3 + rank)
        fed = v1.placeholder(tf.float32, [None, 3])
        hidden = v1.get_variable(
            "hidden", [3, 4], initializer=v1.initializers.random_normal(stddev=0.5)
        )
        bias = v1.get_variable("bias", [4], initializer=v1.initializers.zeros())
        out = v1.get_variable("out", [4, 1], initializer=v1.initializers.random_normal(stddev=0.5))
        v1.get_variable("unused", [2], initializer=v1.initializers.zeros())
        loss = tf.reduce_mean(tf.square(tf.tanh(fed @ hidden + bias) @ out - y))
        step = v1.train.get_or_create_global_step()
        opt = make(v1.train.MomentumOptimizer(0.05, 0.9))
        if kind == "by hand":
            trained = v1.trainable_variables()[:3]
            plain = v1.train.MomentumOptimizer(0.05, 0.9)
            gradients = optimizers.npu_allreduce(tf.gradients(loss, trained))
            update = plain.apply_gradients(zip(gradients, trained), global_step=step)
        else:
            update = opt.minimize(loss, global_step=step)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(broadcast_global_variables(0))
            for _ in range(STEPS):
                session.run(update, {fed: x})
            return {"variables": session.run([hidden, bias, out]), "step": int(session.run(step))}


@pytest.mark.parametrize(
    "kind",
    [
        "NPUDistributedOptimizer",
        "sharded",
        "loss scale",
        "sharded in loss scale",
        "NPUOptimizer",
        "by hand",
    ],
)
def test_ranks_train_as_one(two_ranks: Pool, single: Pool, kind: str) -> None:
    [alone] = single.run(train, kind)
    results = two_ranks.run(train, kind)
    for result in results:
        assert result["step"] == STEPS
        for variable, expected, first in zip(
            result["variables"], alone["variables"], results[0]["variables"]
        ):
            np.testing.assert_array_equal(variable, first)
            np.testing.assert_allclose(variable, expected, rtol=2e-5, atol=1e-6)


def refusals() -> list[str]:
    wrappers = npu_distributed_optimizer_wrapper, NPUDistributedOptimizer
    cases: list[tuple[Any, ...]] = []
    for first, second in itertools.product(wrappers, wrappers):
        wrapped = first(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        cases += [("ValueError", says, second, wrapped) for says in ("twice", "What to do")]
    return wrong_refusals(
        *cases,
        ("ValueError", "at least 1", optimizers.FixedLossScaleManager, 0.5),
        (
            "ValueError",
            "loss_scale_manager",
            lambda: optimizers.NPUOptimizer(None, is_loss_scale=True),
        ),
        ("ValueError", "tf.Operation", all_hooks.set_iteration_per_loop, None, tf.constant(1), 2),
        ("RuntimeError", "eager mode", system.initialize_system),
    )


def test_optimizers_in_sessions_raise_for_wrong_arguments(two_ranks: Pool) -> None:
    assert two_ranks.run(refusals) == [[]] * 2


def overflow() -> list[list[float]]:
    """One rank's gradient overflows in the second step: no rank makes it, and the scale shrinks."""
    v1, last = tf.compat.v1, npu.distribute.rank() == npu.distribute.size() - 1
    with tf.Graph().as_default():
        fed = v1.placeholder(tf.float32, [])
        weight = v1.get_variable("weight", initializer=1.0)
        step = v1.train.get_or_create_global_step()
        manager = ExponentialUpdateLossScaleManager(
            16.0, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5
        )
        opt = NPULossScaleOptimizer(
            v1.train.GradientDescentOptimizer(1.0), manager, is_distributed=True
        )
        update = opt.minimize(weight * fed, global_step=step)
        found = []
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for bad in (False, True, False, False):
                session.run(update, {fed: np.inf if bad and last else 1.0})
                found.append(
                    list(map(float, session.run([weight, step, manager.get_loss_scale()])))
                )
    return found


def test_overflow_on_one_rank_leaves_the_step_out_on_all(two_ranks: Pool) -> None:
    assert (
        two_ranks.run(overflow)
        == [[[0.0, 1, 16.0], [0.0, 1, 8.0], [-1.0, 2, 8.0], [-2.0, 3, 16.0]]] * 2
    )


def several_steps(hook: bool) -> tuple[Any, list[Any]]:
    """Runs of an operation that makes three steps each; data comes from an iterator and a placeholder, and ends."""
    v1 = tf.compat.v1

    class End(v1.train.SessionRunHook):
        def end(self, session: Any) -> None:
            ends.append(session.run(step))

    ends: list[Any] = []
    suppressed = () if hook else (tf.errors.OutOfRangeError,)
    with tf.Graph().as_default():
        numbers = v1.data.make_one_shot_iterator(tf.data.Dataset.range(9)).get_next()
        weight = v1.get_variable("weight", initializer=0.0)
        step = v1.train.get_or_create_global_step()
        opt = NPUDistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        factor = v1.placeholder(tf.float32, [])
        finite = tf.debugging.check_numerics(tf.cast(numbers, tf.float32) * factor, "")
        update = opt.minimize(-weight * finite, global_step=step)
        config = v1.ConfigProto(inter_op_parallelism_threads=1)
        with contextlib.suppress(*suppressed), contextlib.ExitStack() as stack:
            if hook:
                loop = all_hooks.IterationPerLoop().create_iteration_per_loop_var(update)
                hooks = [SetIterationsVarHook(3), End()]
                session = stack.enter_context(
                    v1.train.MonitoredTrainingSession(hooks=hooks, config=config)
                )
            else:
                session = stack.enter_context(v1.Session(config=config))
                session.run(v1.global_variables_initializer())
                assert all_hooks.set_iteration_per_loop(session, update, 1) is update
                loop = all_hooks.set_iteration_per_loop(session, update, 3)
                assert loop.name.endswith("IterationOp")
            session.run(loop, {factor: 1.0})
            session.run(loop, {factor: 2.0})
            found = (*session.run([step, numbers]), float(session.run(weight)))
            assert error_of(session.run, loop, {factor: np.nan}).startswith("InvalidArgumentError")
            session.run(loop, {factor: 1.0})
            raise AssertionError("the data has no end")
    return found, ends


@pytest.mark.parametrize("hook", [False, True])
def test_several_steps_in_one_run(two_ranks: Pool, hook: bool) -> None:
    for found, ends in two_ranks.run(several_steps, hook):
        assert found == (6, 6, float(sum(range(3)) + 2 * sum(range(3, 6))))
        assert ends == [7] * hook


def hooks() -> Any:
    v1, rank = tf.compat.v1, npu.distribute.rank()
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=float(rank + 5))
        kept = v1.get_variable("kept", initializer=float(rank), trainable=False)
        started, stopped = system.initialize_system(), system.shutdown_system()
        forward = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        chosen = [all_hooks.NPUBroadcastGlobalVariablesHook(0, rank), all_hooks.NpuEmptyHook()]
        with v1.train.MonitoredTrainingSession(hooks=chosen) as session:
            for operation in (started, forward, forward):
                session.run(operation)
            weights = session.run([weight, kept])
            session.run(stopped)
    session, stop = system.init_resource()
    names = system.get_npu_rank_id(), system.get_npu_rank_size()
    assert names == (experimental.get_user_rank_id(), experimental.get_user_rank_size())
    assert experimental.get_actual_rank_size("hccl_world_group") == names[1]
    local = system.get_npu_local_rank_id(), system.get_npu_local_rank_size()
    system.shutdown_resource(session, stop)
    system.close_session(session)
    return [float(value) for value in weights], names, local


def test_hooks_and_resources(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(hooks)):
        assert found == ([5.0, 0.0], (rank, ranks.size), (rank, ranks.size))


def strings() -> Any:
    v1, rank = tf.compat.v1, npu.distribute.rank()
    with tf.Graph().as_default():
        own = tf.constant([b"of rank %d" % rank, b"\0\xff" * (rank + 1)])
        words = v1.get_variable("words", initializer=own, trainable=False)
        number = v1.get_variable("number", initializer=float(rank))
        hook = all_hooks.NPUBroadcastGlobalVariablesHook(npu.distribute.size() - 1)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            return session.run(words).tolist(), float(session.run(number))


def test_the_hook_sends_strings(ranks: Pool) -> None:
    last = ranks.size - 1
    expected = [b"of rank %d" % last, b"\0\xff" * ranks.size], float(last)
    assert ranks.run(strings) == [expected] * ranks.size


def hooks_that_report() -> Any:
    """As on Ascend's page: a list of tensors, or a dict; the step and the loss in the environment."""
    v1, rank = tf.compat.v1, npu.distribute.rank()
    by_name: list[Any] = []
    by_key: list[Any] = []
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        weight = v1.get_variable("weight", initializer=float(rank))
        loss = tf.identity(weight * weight, name="loss")
        opt = NPUDistributedOptimizer(v1.train.GradientDescentOptimizer(0.25))
        train = opt.minimize(loss, global_step=step)
        chosen = [
            all_hooks.NPUBroadcastGlobalVariablesHook(1 % npu.distribute.size()),
            all_hooks.NPUOutputTensorHook([loss, "loss"], output_fn=by_name.extend),
            all_hooks.NPUOutputTensorHook(
                {"loss": loss, "name": "loss"}, None, by_key.append, output_every_n_steps=2
            ),
            all_hooks.NPUOutputTensorHook(None),
            all_hooks.TellMeStepOrLossHook(step, total_step=3, loss=loss, final_loss=0.5),
            v1.train.StopAtStepHook(last_step=3),
        ]
        told = "STEP_NOW", "TOTAL_STEP", "LOSS_NOW", "TARGET_LOSS"
        with settings(), v1.train.MonitoredTrainingSession(hooks=chosen) as session:
            while not session.should_stop():
                session.run(train)
            texts = [float(os.environ[name]) for name in told]
    with pytest.raises(ValueError, match="neither"):
        all_hooks.TellMeStepOrLossHook(total_step=3)
    return by_name, by_key, texts


def test_hooks_that_report(ranks: Pool) -> None:
    first = float(ranks.size > 1)
    losses = [first, first / 4, first / 16]
    for by_name, by_key, texts in ranks.run(hooks_that_report):
        for key in ("loss:0", "loss"):
            assert [one[key] for one in by_name] == losses
        for key in ("loss", "name"):
            found = [[one[key] for one in several] for several in by_key]
            assert found == [losses[:2], losses[2:]]
        assert texts == [texts[0], 3, losses[2], 0.5] and texts[0] in (2, 3)


def keras_in_a_session() -> list[list[float]]:
    """Keras 2 with a session of TensorFlow 1: fit with the callback and the wrapper."""
    keras, v1, size, rank = tf.keras, tf.compat.v1, npu.open().workers_num, npu.open().worker_id
    x, y = (array[rank::size] for array in data())
    with tf.Graph().as_default(), v1.Session() as session:
        compat.session_backend().set_session(session)
        apart = keras.initializers.GlorotUniform(seed=rank)
        model = keras.Sequential(
            [keras.layers.Dense(1, kernel_initializer=apart, input_shape=(3,))]
        )
        model.compile(npu_distributed_optimizer_wrapper(keras.optimizers.legacy.SGD(0.1)), "mse")
        before = model.get_weights()
        callbacks = [NPUBroadcastGlobalVariablesCallback(0)]
        model.fit(x, y, batch_size=len(x), epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        after = model.get_weights()
    compat.session_backend().clear_session()
    return [array.ravel().tolist() for array in (before[0], after[0])]


@pytest.mark.only_keras("2")
def test_keras_in_a_session(keras_two_ranks: Pool) -> None:
    (before_0, after_0), (before_1, after_1) = keras_two_ranks.run(keras_in_a_session)
    assert before_0 != before_1
    assert after_0 == after_1
    x, y = data()
    weights = np.array(before_0)[:, np.newaxis]
    bias = 0.0
    for _ in range(3):
        error = x @ weights + bias - y
        weights, bias = weights - 0.1 * 2 * x.T @ error / ROWS, bias - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(after_0, weights.ravel(), rtol=1e-4)
