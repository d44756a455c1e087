"""``NPUEstimator`` where TensorFlow has Estimators, its error where not; ``NPUStrategy`` and ``Profiler``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job
import pytest
import tensorflow as tf
from ranks import free_port

from npu_device._src import compat
from npu_device._src.tf1.run_config import (
    NPUEstimator,
    NPUEstimatorSpec,
    NPURunConfig,
    model_to_npu_estimator,
    npu_run_config_init,
)
from npu_device._src.tf1.system import NPUStrategy, Profiler
from npu_device._src.training.groups import get_rank_id

has_estimators = pytest.mark.skipif(compat.estimator_module() is None, reason="this TensorFlow has no Estimator")
has_none = pytest.mark.skipif(compat.estimator_module() is not None, reason="this TensorFlow has Estimators")


@pytest.fixture(autouse=True)
def close_writers() -> Iterator[None]:
    """Close the summary writers, which TensorFlow's Estimator leaves open."""
    yield
    tf.compat.v1.summary.FileWriterCache.clear()


@has_none
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("NPUEstimator", lambda: NPUEstimator(model_fn=print, config=NPURunConfig(model_dir="/tmp/model"))),
        ("NPUEstimatorSpec", lambda: NPUEstimatorSpec("train", loss=tf.constant(0.0))),
        ("model_to_npu_estimator", lambda: model_to_npu_estimator(object(), config=NPURunConfig())),
        ("npu_run_config_init", npu_run_config_init),
    ],
)
def test_without_estimators_a_call_names_the_version_and_the_ways_out(name: str, call: Any) -> None:
    text = rf"^{name} depends on tf.estimator.*this is TensorFlow {tf.__version__}\.\n.*tensorflow==2\.15.*Monitored"
    with pytest.raises(NotImplementedError, match=text):
        call()


def line(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """A model of y = w·x, which begins with w = 0."""
    w = tf.compat.v1.get_variable("w", [], initializer=tf.compat.v1.zeros_initializer())
    if mode == "infer":
        return NPUEstimatorSpec(mode, predictions=features * w)
    loss = tf.reduce_mean((features * w - labels) ** 2)
    step = tf.compat.v1.train.get_or_create_global_step()
    train = tf.compat.v1.train.GradientDescentOptimizer(params["rate"]).minimize(loss, global_step=step)
    return NPUEstimatorSpec(mode, predictions=features * w, loss=loss, train_op=train, host_call=(print, []))


def pairs() -> Any:
    return tf.compat.v1.data.Dataset.from_tensors((tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0]))).repeat()


@has_estimators
def test_estimator_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    session = tf.compat.v1.ConfigProto()
    config = NPURunConfig(model_dir=str(tmp_path), iterations_per_loop=5, session_config=session)
    estimator = NPUEstimator(model_fn=line, config=config, params={"rate": 0.2})
    estimator.train(pairs, max_steps=20)
    assert estimator.get_variable_value("w") == pytest.approx(3.0)
    assert estimator.evaluate(pairs, steps=1)["loss"] == pytest.approx(0.0, abs=1e-6)
    assert next(estimator.predict(pairs)) == pytest.approx(3.0)
    assert estimator.config.iterations_per_loop == 5
    with pytest.raises(ValueError, match="NPUEstimator takes an NPURunConfig as config; found None"):
        NPUEstimator(model_fn=line)


@has_estimators
@pytest.mark.filterwarnings("ignore::UserWarning:keras.*")  # at what TensorFlow's Estimator calls
def test_estimator_of_a_keras_model(tmp_path: Path) -> None:
    def columns() -> Any:
        return pairs().map(lambda x, y: (x[:, None], y[:, None]))

    keras = tf.compat.v1.keras
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, input_shape=[1], kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.2), "mse")
    estimator = model_to_npu_estimator(model, model_dir=str(tmp_path), config=NPURunConfig())
    assert isinstance(estimator, NPUEstimator)
    estimator.train(columns, steps=20)
    assert estimator.evaluate(columns, steps=1)["loss"] == pytest.approx(0.0, abs=1e-6)


def body_train() -> float:
    """Train from another variable on each rank; what is left of it."""
    rank = float(get_rank_id())

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        w = tf.compat.v1.get_variable("w", initializer=rank + 5)
        step = tf.compat.v1.train.get_or_create_global_step()
        train = tf.group(tf.compat.v1.assign_add(w, 1.0), tf.compat.v1.assign_add(step, 1))
        return tf.compat.v1.estimator.EstimatorSpec(mode, loss=tf.reduce_sum(features * labels), train_op=train)

    with tempfile.TemporaryDirectory() as directory:
        estimator = NPUEstimator(model_fn=model_fn, config=NPURunConfig(model_dir=directory))
        estimator.train(pairs, steps=2)
        tf.compat.v1.summary.FileWriterCache.clear()
        return float(estimator.get_variable_value("w"))


RANKS = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from npu_bridge.npu_init import npu_run_config_init
import test_estimator

before = os.environ["TF_CONFIG"]
assert not npu_run_config_init().cluster_spec.as_dict()
print("trained", test_estimator.body_train())
assert os.environ["TF_CONFIG"] == before
"""


@has_estimators
def test_ranks_begin_with_the_variables_of_rank_0_and_tf_config_starts_no_servers(tmp_path: Path) -> None:
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    environments = [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}
        for rank in range(2)
    ]
    for ended in job.finish(job.start_each(tmp_path, RANKS, environments)):
        assert ended.code == 0, ended.output
        assert "trained 7.0" in ended.output


@has_estimators
def test_run_config_of_tensorflow_gets_the_session_configuration() -> None:
    config = npu_run_config_init(tf.compat.v1.estimator.RunConfig(save_summary_steps=7))
    assert config.save_summary_steps == 7
    assert config.session_config.graph_options.rewrite_options.custom_optimizers[0].name == "NpuOptimizer"


def test_strategy_places_variables_and_runs() -> None:
    strategy = NPUStrategy()
    assert isinstance(strategy, tf.compat.v1.distribute.OneDeviceStrategy)
    with strategy.scope():
        variable = tf.Variable(2.0)
    assert "cpu:0" in variable.device.lower()
    assert strategy.run(lambda: variable * 3).numpy() == 6


def test_profiler_writes_a_profile_and_is_not_nested(tmp_path: Path) -> None:
    with Profiler(output_path=str(tmp_path / "outer")):
        tf.constant(1.0) + 1
        with pytest.raises(RuntimeError, match="another profile is being taken"), Profiler():
            pass
    assert list(tmp_path.glob("outer/**/*.xplane.pb"))
