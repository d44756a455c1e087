"""What divided updates mean for files and for reads of slots, with either Keras; and where they have no effect."""

from __future__ import annotations

import os
from typing import Any, Callable
from unittest.mock import patch

import pytest
import tensorflow as tf
from caught_messages import warnings_of_package
from divided_bodies import (
    QUICK_WAYS,
    SHAPES,
    WAYS,
    assert_divided,
    body_direct_reads,
    body_fit_checkpoint,
    body_job_checkpoint_of_ranks,
    body_loaded_model,
    body_model_saved,
    body_read_in_functions,
    body_restored,
    body_resumed,
    body_same_bits,
    body_scaled_later,
    body_two_optimizers,
    body_without_shares,
    make_variables,
    train,
)
from launcher import npurun, script
from pool import Pool
from ranks import all_through
from versions import needs_keras_3

from npu_device._src.tf1.distributed_optimizer import npu_distributed_optimizer_wrapper
from npu_device._src.training.watching.wrapped_optimizers import reducer_of, reducing_optimizer

full = pytest.mark.full
KERASES = [
    pytest.param("3", marks=needs_keras_3, id="keras3"),
    pytest.param("2", marks=full, id="tf_keras"),
]
EITHER = [KERASES[0], pytest.param("2", id="tf_keras")]
by_keras = pytest.mark.parametrize("keras", KERASES)


@full
@by_keras
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_loss_scale_optimizer_may_come_later(
    pool_with: Callable[..., Pool], keras: str, graph: bool
) -> None:
    assert pool_with(3, keras).run(body_scaled_later, graph) == [[True, True]] * 3


@by_keras
def test_a_loaded_model_goes_on(pool_with: Callable[..., Pool], tmp_path: Any, keras: str) -> None:
    assert pool_with(2, keras).run(body_loaded_model, str(tmp_path)) == [[True, True]] * 2


@full
@by_keras
def test_a_backup_is_resumed(pool_with: Callable[..., Pool], tmp_path: Any, keras: str) -> None:
    assert pool_with(2, keras).run(body_resumed, str(tmp_path)) == [[True, True]] * 2


@by_keras
def test_reads_are_complete_or_raise(
    pool_with: Callable[..., Pool], tmp_path: Any, keras: str
) -> None:
    assert pool_with(2, keras).run(body_direct_reads, str(tmp_path)) == [[]] * 2


@full
@by_keras
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (4, 1)])
@pytest.mark.parametrize(
    ("divides_first", "divides_then"), [(True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize("body", [body_fit_checkpoint, body_job_checkpoint_of_ranks])
def test_checkpoints_are_restored_on_another_number_of_ranks(
    pool_with: Callable[..., Pool],
    tmp_path: Any,
    keras: str,
    saving: int,
    loading: int,
    divides_first: bool,
    divides_then: bool,
    body: Callable[..., Any],
) -> None:
    saved = pool_with(saving, keras).run(body, str(tmp_path), True, divides_first)
    folder, state = saved[0]
    loaded = pool_with(loading, keras).run(body, folder, False, divides_then)
    assert loaded == [(folder, state)] * loading


@by_keras
def test_functions_traced_before_the_first_step_read_right_or_raise(
    pool_with: Callable[..., Pool], keras: str
) -> None:
    assert pool_with(2, keras).run(body_read_in_functions) == [[]] * 2


@pytest.mark.parametrize("keras", EITHER)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=full)])
def test_models_are_saved_with_all_state(
    pool_with: Callable[..., Pool], tmp_path: Any, count: int, keras: str
) -> None:
    assert pool_with(count, keras).run(body_model_saved, str(tmp_path)) == [[]] * count


@by_keras
@pytest.mark.parametrize("ways", [QUICK_WAYS, pytest.param(list(WAYS), marks=full)])
def test_files_are_restored_by_some_ranks(
    pool_with: Callable[..., Pool], tmp_path: Any, ways: list[str], keras: str
) -> None:
    assert pool_with(3, keras).run(body_restored, ways, str(tmp_path)) == [[]] * 3


@by_keras
@pytest.mark.parametrize("graph", [pytest.param(False, marks=full), True], ids=["eager", "graph"])
def test_divided_updates_through_sockets_have_the_bits_of_whole_ones(
    pool_with: Callable[..., Pool], graph: bool, keras: str
) -> None:
    ranks = pool_with(3, keras, **all_through("tcp"))
    found = ranks.run(body_same_bits, "adam", graph, SHAPES, ["float32"], 1, False)
    assert_divided(found, "adam")


@by_keras
@pytest.mark.parametrize(
    ("count", "graph", "names"),
    [
        (2, False, ["slow", "averages", "npu dynamic"]),
        (3, True, ["adam", "overwritten, accumulated"]),
        *(
            pytest.param(count, graph, None, marks=full)
            for count in (2, 3)
            for graph in (False, True)
        ),
    ],
)
def test_rank_0_saves_while_others_that_update_nothing_train_on(
    pool_with: Callable[..., Pool],
    tmp_path: Any,
    keras: str,
    count: int,
    graph: bool,
    names: list[str] | None,
) -> None:
    either = ["slow", "averages", "adam"]
    names = names or [*either, "npu dynamic", "accumulated", "overwritten, accumulated"]
    if keras == "2":
        names = [name for name in names if name in either]
    ranks = pool_with(count, keras)
    assert ranks.run(body_without_shares, names, graph, str(tmp_path)) == [[]] * count


@full
@by_keras
def test_two_optimizers_share_variables(pool_with: Callable[..., Pool], keras: str) -> None:
    found = pool_with(3, keras).run(body_two_optimizers)
    assert all(is_same and weights == found[0][1] for is_same, weights in found)


def body_no_effect() -> list[tuple[list[str], bool]]:
    """Ask for divided updates by the environment where they have no effect; return the warnings of each optimizer, and
    whether it is divided after all.
    """
    import npu_device.horovod.tensorflow as hvd

    found = []
    with patch.dict(os.environ, NPU_DEVICE_SHARD_OPTIMIZER="on"):
        variables = make_variables(SHAPES[:3], ["float32"])
        with warnings_of_package() as heard:
            optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
            train(optimizer, variables, False, 2)
        found.append(
            (list(heard), reducer_of(reducing_optimizer(optimizer)).divided_update is not None)
        )
        with tf.Graph().as_default(), warnings_of_package() as heard:
            weight = tf.compat.v1.get_variable("weight", [3], initializer=tf.ones_initializer())
            plain = tf.compat.v1.train.AdamOptimizer(0.1)
            step = npu_distributed_optimizer_wrapper(plain).minimize(tf.reduce_sum(weight**2))
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(step)
                session.run(weight)
        found.append((list(heard), reducer_of(plain) is not None))
    return found


@by_keras
def test_horovod_and_sessions_warn_once(pool_with: Callable[..., Pool], keras: str) -> None:
    found, of_others = pool_with(2, keras).run(body_no_effect)
    for (heard, is_divided), name in zip(
        found, ("DistributedOptimizer of Horovod", "TensorFlow 1")
    ):
        assert len(heard) == 1 and "shard_optimizer has no effect" in heard[0], heard
        assert name in heard[0] and not is_divided
    assert of_others == [([], False)] * 2


VERIFIED = """
import numpy as np, tensorflow as tf
import npu_device as npu
npu.open()
tf.keras.utils.set_random_seed(1)
x = np.random.default_rng(0).standard_normal([36, 9]).astype(np.float32)
layers = [tf.keras.Input([9]), tf.keras.layers.Dense(7), tf.keras.layers.Dense(1)]
model = tf.keras.Sequential(layers)
model.compile(tf.keras.optimizers.Adam(0.01), "mse")
model = npu.distribute.replicate(model, shard_optimizer=True)
model.fit(x, x[:, :1], batch_size=12, verbose=0)
"""


@full
@by_keras
def test_verify_compares_whole_updates(tmp_path: Any, keras: str) -> None:
    uses_tf_keras = str(int(keras == "2"))
    done = npurun(
        "verify", "-n", "2", script(tmp_path, VERIFIED), TF_USE_LEGACY_KERAS=uses_tf_keras
    )
    assert b"the same: N ranks give the single-process result" in done.stdout, done.stdout
