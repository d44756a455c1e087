"""Session configurations with the custom optimizer "NpuOptimizer"; ``NPURunConfig``, and ``NPUEstimator`` where
TensorFlow has Estimators, its error where not; ``NPUStrategy`` and ``Profiler``.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import job
import pytest
import tensorflow as tf
from pool import Pool
from ranks import free_port

from npu_device._src import compat
from npu_device._src.collectives.resources import LEAST_INTER_OP_THREADS
from npu_device._src.options import global_options, option_group
from npu_device._src.tf1 import config as tf1, run_config
from npu_device._src.tf1.config import RewriterConfig, SessionConfigBuilder, npu_config_proto
from npu_device._src.tf1.run_config import (
    NPUEstimator,
    NPURunConfig,
    ProfilingConfig,
    npu_run_config_init,
)
from npu_device._src.tf1.system import NPUStrategy, Profiler, set_graph_exec_config
from npu_device._src.training.distribute.groups import get_rank_id

has_estimators = pytest.mark.skipif(
    compat.estimator_module() is None, reason="this TensorFlow has no Estimator"
)
has_none = pytest.mark.skipif(
    compat.estimator_module() is not None, reason="this TensorFlow has Estimators"
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test begins with the options of a new process, and closes what TensorFlow's Estimator leaves open."""
    with option_group.new_options():
        yield
    tf.compat.v1.summary.FileWriterCache.clear()


def hand_made(*names: str, **rewrites: Any) -> Any:
    """A configuration as scripts write it, with the common parameters, a misspelt one, and further optimizers."""
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    for name in names or ("NpuOptimizer",):
        custom = config.graph_options.rewrite_options.custom_optimizers.add()
        custom.name = name
        custom.parameter_map["use_off_line"].b = True
        custom.parameter_map["precision_mode"].s = tf.compat.as_bytes("allow_mix_precision")
        custom.parameter_map["graph_run_mode"].i = 1
        custom.parameter_map["sfusion_switch_file"].s = b"/nowhere/switch.cfg"
    added = RewriterConfig(
        remapping=RewriterConfig.OFF, memory_optimization=RewriterConfig.OFF, **rewrites
    )
    config.graph_options.rewrite_options.MergeFrom(added)
    return config


CONFIGS = {
    "hand-made": hand_made,
    "with others": lambda: hand_made("NpuOptimizer", "GradFusionOptimizer", "function"),
    "optimizers by name": lambda: hand_made(optimizers=["NpuOptimizer", "function", "constfold"]),
    "fail_on_optimizer_errors": lambda: hand_made(fail_on_optimizer_errors=True),
    "npu_config_proto of a hand-made one": lambda: npu_config_proto(hand_made()),
    "builder": lambda: SessionConfigBuilder().session_config,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_session_trains_with_the_configuration(name: str) -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2])
        w = tf.compat.v1.get_variable("w", initializer=tf.constant([[1.0], [2.0]]))
        loss = tf.reduce_sum(tf.matmul(x, w))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(loss)
        with tf.compat.v1.train.MonitoredTrainingSession(config=CONFIGS[name]()) as session:
            assert session.run([train, loss], {x: [[3.0, 4.0]]})[1] == 11
            assert session.run(w).tolist() == [[-0.5], [0.0]]


def optimizers_of(config: Any) -> dict[str, Any]:
    return {
        each.name: each.parameter_map
        for each in config.graph_options.rewrite_options.custom_optimizers
    }


def test_npu_config_proto_changes_the_configuration_it_is_given() -> None:
    given = tf.compat.v1.ConfigProto(log_device_placement=True, inter_op_parallelism_threads=3)
    config = npu_config_proto(config_proto=given)
    assert npu_config_proto(config) is config is given
    assert list(optimizers_of(config)) == ["NpuOptimizer"]
    assert config.allow_soft_placement
    assert not config.log_device_placement
    assert config.inter_op_parallelism_threads == 3
    rewrites = config.graph_options.rewrite_options
    assert rewrites.remapping == rewrites.memory_optimization == RewriterConfig.OFF
    assert (
        config.graph_options.optimizer_options.global_jit_level == tf.compat.v1.OptimizerOptions.OFF
    )


@pytest.mark.parametrize("given", [None, {}, "config"])
def test_anything_else_gives_a_new_configuration(given: Any) -> None:
    assert list(optimizers_of(npu_config_proto(given))) == ["NpuOptimizer"]
    assert tf1.npu_optimizer_options(given).global_jit_level == tf.compat.v1.OptimizerOptions.OFF
    assert (
        tf1.npu_graph_options(given).optimizer_options.global_jit_level
        == tf.compat.v1.OptimizerOptions.OFF
    )


def test_the_optimizer_is_found_among_others_and_keeps_its_parameters() -> None:
    optimizers = optimizers_of(npu_config_proto(hand_made("GradFusionOptimizer", "NpuOptimizer")))
    assert list(optimizers) == ["GradFusionOptimizer", "NpuOptimizer"]
    assert optimizers["NpuOptimizer"]["precision_mode"].s == b"allow_mix_precision"
    assert "hcom_parallel" not in optimizers["NpuOptimizer"]


def test_parameters_that_are_there_have_their_effect_and_others_change_nothing() -> None:
    options, profiling = global_options(), global_options().profiling_config
    usual = profiling.profiling_options.value
    given = tf.compat.v1.ConfigProto()
    builder = SessionConfigBuilder(given)
    parameters = builder.parameter_map
    parameters["hcom_parallel"].b = False
    parameters["profiling_mode"].b = True
    parameters["profiling_options"].s = b""  # the usual ones
    parameters["aoe_mode"].s = tf.compat.as_bytes("4")
    parameters["work_path"].s = tf.compat.as_bytes("/tmp/tuning")
    assert options.hcom_parallel.typed is True
    assert builder.session_config is given
    npu_config_proto(hand_made())
    assert (options.hcom_parallel.typed, profiling.enable_profiling.typed) == (False, True)
    assert profiling.profiling_options.value == usual
    assert (options.aoe_config.aoe_mode.value, options.aoe_config.work_path.value) == (
        "4",
        "/tmp/tuning",
    )
    parameters["profiling_options"].s = tf.compat.as_bytes(
        '{"output":"/tmp/profile","training_trace":"on"}'
    )
    tf1.npu_session_config_init(given)
    assert json.loads(profiling.profiling_options.value)["output"] == "/tmp/profile"
    parameters["aoe_mode"].s = b"3"
    with pytest.raises(ValueError, match=r"aoe_config\.aoe_mode"):
        npu_config_proto(given)


def test_settings_of_the_compiler_are_taken_by_position() -> None:
    fetch = tf.constant(1)
    assert (
        set_graph_exec_config(fetch, True, "lazy_recompile", "data:[1~8,3]", is_train_graph=True)
        is fetch
    )


def test_decorator_gives_sessions_the_configuration() -> None:
    @tf1.decorator_tf_session
    def make_session(target: str = "", graph: Any = None, config: Any = None) -> Any:
        return target, config

    given = tf.compat.v1.ConfigProto()
    target, config = make_session("here", None, given)
    assert target == "here" and config is given
    assert [list(optimizers_of(each)) for each in (config, make_session()[1])] == [
        ["NpuOptimizer"]
    ] * 2


@pytest.mark.slow
def test_keras_2_trains_in_the_session_with_the_configuration(tmp_path: Path) -> None:
    # Switches TensorFlow to version 1 and needs Keras 2: a process of its own.
    program = """
        import numpy as np
        import tensorflow as tf
        import npu_device
        from npu_device._src.tf1 import config as tf1
        npu_device.compat.enable_v1()
        assert not tf.executing_eagerly()
        for _ in range(2):
            config = tf.compat.v1.ConfigProto()
            session = tf1.set_keras_session_npu_config(config)
            assert config.graph_options.rewrite_options.custom_optimizers[0].name == "NpuOptimizer"
            assert tf.compat.v1.keras.backend.get_session() is session is tf1.backend.get_session()
            keras = tf.compat.v1.keras
            model = keras.Sequential([keras.layers.Dense(1, input_shape=[1])])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(np.array([[1.0], [2.0]]), np.array([[2.0], [4.0]]), epochs=300, verbose=0)
            assert abs(model.predict(np.array([[3.0]]))[0, 0] - 6) < 0.1
            tf1.npu_clear_session()
            assert keras.backend.get_session() is not session
        """
    job.outputs(tmp_path, 1, textwrap.dedent(program), TF_USE_LEGACY_KERAS="1")


def test_run_config_records_what_it_is_given() -> None:
    dump = run_config.DumpConfig(enable_dump=True, dump_path="/tmp/dump", dump_step="0|5")
    given = {
        "model_dir": "/tmp/model",
        "precision_mode": "allow_mix_precision",
        "dump_config": dump,
        "later": "too",
    }
    config = NPURunConfig(10, session_config=tf.compat.v1.ConfigProto(), **given)
    defaults = {
        "save_checkpoints_steps": 100,
        "save_checkpoints_secs": None,
        "keep_checkpoint_max": 5,
    }
    others = {
        "save_summary_steps": 0,
        "hcom_parallel": True,
        "jit_compile": "auto",
        "oo_level": "O3",
    }
    expected = {"iterations_per_loop": 10, **given, **defaults, **others}
    assert {name: getattr(config, name) for name in expected} == expected
    assert list(optimizers_of(config.session_config)) == ["NpuOptimizer"]
    parameters = inspect.signature(NPURunConfig).parameters
    assert not [name for name in parameters if name != "keywords" and not hasattr(config, name)]
    by_position = NPURunConfig(
        *(parameter.default for parameter in list(parameters.values())[:-2]), "switches"
    )
    assert (by_position.oo_level, by_position.optimization_switch) == ("O3", "switches")
    assert NPURunConfig(save_checkpoints_secs=60).save_checkpoints_steps is None
    with pytest.raises(TypeError, match="multiple values for argument 'iterations_per_loop'"):
        NPURunConfig(1, iterations_per_loop=1)


def test_run_config_sets_options() -> None:
    options, profiling = global_options(), global_options().profiling_config
    NPURunConfig()
    assert options.hcom_parallel.typed is True
    traces = ProfilingConfig(True, ["training_trace", "task_trace"])
    NPURunConfig(hcom_parallel=False, profiling_config=traces, aoe_mode="4")
    found = (
        options.aoe_config.aoe_mode.value,
        options.hcom_parallel.typed,
        profiling.enable_profiling.typed,
    )
    assert found == ("4", False, True)
    expected = {"output": "./", "training_trace": "on", "task_trace": "on"}
    assert json.loads(profiling.profiling_options.value) == expected


@pytest.mark.parametrize("keyword", ["profiling_options", "enable_options"])
def test_profiling_options_under_both_names(keyword: str) -> None:
    assert (
        ProfilingConfig(enable_profiling=True, **{keyword: '{"output":"x"}'}).as_json()
        == '{"output":"x"}'
    )
    assert (
        ProfilingConfig(**{keyword: ["op_trace"]}).as_json() == '{"output": "./", "op_trace": "on"}'
    )
    assert ProfilingConfig().as_json() is None


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"iterations_per_loop": 0}, ValueError, "iterations_per_loop must be .*; found 0"),
        ({"iterations_per_loop": 2.0}, ValueError, "iterations_per_loop must be .*; found 2.0"),
        ({"mix_compile_mode": 1}, TypeError, "mix_compile_mode must be .*; found 1"),
        (
            {"mix_compile_mode": True, "iterations_per_loop": 2},
            ValueError,
            "must be 1 with mix_compile_mode",
        ),
        ({"graph_run_mode": 2}, ValueError, "graph_run_mode must be .*; found 2"),
        ({"jit_compile": True}, TypeError, "jit_compile must be a string"),
    ],
)
def test_run_config_refuses(keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        NPURunConfig(**keywords)


@has_none
@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("NPUEstimator", {"model_fn": print}),
        ("NPUEstimatorSpec", {"mode": "train"}),
        ("model_to_npu_estimator", {"keras_model": None}),
        ("npu_run_config_init", {}),
    ],
)
def test_without_estimators_a_call_names_the_version_and_the_ways_out(
    name: str, keywords: dict[str, Any]
) -> None:
    text = rf"^{name} depends on tf.estimator.*this is TensorFlow {tf.__version__}\.\n.*tensorflow==2\.15.*Monitored"
    with pytest.raises(NotImplementedError, match=text):
        getattr(run_config, name)(**keywords)


def line(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """A model of y = w·x, which begins with w = 0."""
    w = tf.compat.v1.get_variable("w", [], initializer=tf.compat.v1.zeros_initializer())
    if mode == "infer":
        return run_config.NPUEstimatorSpec(mode, predictions=features * w)
    loss = tf.reduce_mean((features * w - labels) ** 2)
    step = tf.compat.v1.train.get_or_create_global_step()
    train = tf.compat.v1.train.GradientDescentOptimizer(params["rate"]).minimize(
        loss, global_step=step
    )
    # All arguments by position, host_call last.
    spec = run_config.NPUEstimatorSpec(mode, features * w, loss, train, *[None] * 7, (print, []))
    assert spec.host_call == (print, [])
    return spec


def pairs() -> Any:
    return tf.compat.v1.data.Dataset.from_tensors(
        (tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0]))
    ).repeat()


@has_estimators
def test_session_config_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    session = tf.compat.v1.ConfigProto()
    config = NPURunConfig(model_dir=str(tmp_path), iterations_per_loop=5, session_config=session)
    estimator = NPUEstimator(model_fn=line, config=config, params={"rate": 0.2})
    estimator.train(pairs, None, None, 20)
    assert estimator.get_variable_value("w") == pytest.approx(3.0)
    assert estimator.evaluate(pairs, steps=1)["loss"] == pytest.approx(0.0, abs=1e-6)
    assert next(estimator.predict(pairs)) == pytest.approx(3.0)
    assert estimator.config.iterations_per_loop == 5
    with pytest.raises(
        ValueError, match="NPUEstimator takes an NPURunConfig as config; found None"
    ):
        NPUEstimator(model_fn=line)


@has_estimators
@pytest.mark.filterwarnings("ignore::UserWarning:keras.*")  # at what TensorFlow's Estimator calls
def test_session_config_of_a_keras_model(tmp_path: Path) -> None:
    def columns() -> Any:
        return pairs().map(lambda x, y: (x[:, None], y[:, None]))

    keras = tf.compat.v1.keras
    model = keras.Sequential(
        [keras.layers.Dense(1, use_bias=False, input_shape=[1], kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(0.2), "mse")
    estimator = run_config.model_to_npu_estimator(
        model, model_dir=str(tmp_path), config=NPURunConfig()
    )
    assert isinstance(estimator, NPUEstimator)
    estimator.train(columns, steps=20)
    assert estimator.evaluate(columns, steps=1)["loss"] == pytest.approx(0.0, abs=1e-6)


def adding(model_dir: str) -> NPUEstimator:
    """Return an estimator that adds 1 to a variable in each step, which begins with another value on each rank."""
    rank = float(get_rank_id())

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        w = tf.compat.v1.get_variable("w", initializer=rank + 5)
        step = tf.compat.v1.train.get_or_create_global_step()
        train = tf.group(tf.compat.v1.assign_add(w, 1.0), tf.compat.v1.assign_add(step, 1))
        return tf.compat.v1.estimator.EstimatorSpec(
            mode, loss=tf.reduce_sum(features * labels), train_op=train
        )

    config = NPURunConfig(model_dir=model_dir, save_checkpoints_steps=1)
    return NPUEstimator(model_fn=model_fn, config=config)


def body_train(
    model_dir: str, steps: int | None, max_steps: int | None = None
) -> tuple[str, float]:
    """Train; return the checkpoint before, and what is left of the variable."""
    estimator = adding(model_dir)
    before = Path(estimator.latest_checkpoint() or "none").name
    estimator.train(pairs, [], steps, max_steps)
    tf.compat.v1.summary.FileWriterCache.clear()
    return before, float(estimator.get_variable_value("w"))


RANKS = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from npu_bridge.npu_init import npu_run_config_init
from test_session_config import adding, body_train, get_rank_id, pairs

before = os.environ["TF_CONFIG"]
assert not npu_run_config_init().cluster_spec.as_dict()
SCRIPT
assert os.environ["TF_CONFIG"] == before
"""


def outputs_of_two_ranks(tmp_path: Path, script: str) -> list[str]:
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    tasks = [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        for rank in range(2)
    ]
    environments = [{"TF_CONFIG": json.dumps(task)} for task in tasks]
    started = job.start_each(tmp_path, RANKS.replace("SCRIPT", script), environments)
    results = job.finish(started)
    assert [ended.code for ended in results] == [0, 0], results
    return [ended.output for ended in results]


@has_estimators
def test_ranks_begin_with_the_variables_of_rank_0_and_tf_config_starts_no_servers(
    tmp_path: Path,
) -> None:
    # A job of one rank has begun, so that only rank 0 finds its checkpoint.
    model = str(tmp_path / "model")
    assert body_train(model, 1) == ("none", 6.0)
    script = f'print("trained", body_train({model!r}, 10))'
    for output in outputs_of_two_ranks(tmp_path, script):
        assert "trained ('model.ckpt-1', 16.0)" in output
    for folder in (model, f"{model}/rank1"):
        assert tf.train.load_checkpoint(folder).get_tensor("w") == 16
    # The files of rank 0 are removed for a new beginning, so that the other rank's checkpoint doesn't count, either.
    for path in Path(model).glob("*.*"):
        path.unlink()
    Path(model, "checkpoint").unlink()
    for output in outputs_of_two_ranks(tmp_path, script):
        assert ", 15.0)" in output, output


APART = """
rank = get_rank_id()
first, second = f"DIRECTORY/first/rank{rank}", f"DIRECTORY/second/rank{rank}"
if rank == 1:
    print("alone", adding(second).get_variable_value("w"))
adding(first).train(pairs, max_steps=2)
print("trained", body_train(first, None, 5), body_train(second, None, 4))
"""


@has_estimators
def test_ranks_with_folders_of_their_own_follow_rank_0_when_they_train(tmp_path: Path) -> None:
    # In the first folders only rank 0 has a checkpoint, which has more steps than the training; in the second, rank 1.
    assert body_train(f"{tmp_path}/first/rank0", 3) == ("none", 8.0)
    assert body_train(f"{tmp_path}/second/rank1", 9) == ("none", 14.0)
    first, second = outputs_of_two_ranks(tmp_path, APART.replace("DIRECTORY", str(tmp_path)))
    assert "trained ('model.ckpt-3', 10.0) ('none', 9.0)" in first
    assert "alone 14.0" in second
    assert "trained ('none', 10.0) ('model.ckpt-9', 9.0)" in second


@has_estimators
def test_run_config_of_tensorflow_gets_the_session_configuration() -> None:
    config = npu_run_config_init(tf.compat.v1.estimator.RunConfig(save_summary_steps=7))
    assert config.save_summary_steps == 7
    assert list(optimizers_of(config.session_config)) == ["NpuOptimizer"]


def body_plain_estimator(
    in_config: dict[str, str], in_estimator: dict[str, str]
) -> tuple[str, list[int]]:
    """Train; return the folder, and the threads of the sessions of this estimator and of an ``NPUEstimator``."""
    config = tf.compat.v1.estimator.RunConfig(save_checkpoints_steps=1, **in_config)
    estimator = tf.compat.v1.estimator.Estimator(
        line, config=npu_run_config_init(config), params={"rate": 0.2}, **in_estimator
    )
    estimator.train(pairs, steps=2)
    tf.compat.v1.summary.FileWriterCache.clear()
    estimators = [estimator, NPUEstimator(line, config=NPURunConfig())]
    configs = [estimator.config.session_config for estimator in estimators]
    return estimator.model_dir, [config.inter_op_parallelism_threads for config in configs]


@has_estimators
@pytest.mark.parametrize("given", ["config", "estimator", "config and estimator"])
def test_a_plain_estimator_writes_to_the_folder_of_its_rank(
    two_ranks: Pool, tmp_path: Path, given: str
) -> None:
    arguments: list[dict[str, str]] = [{}, {}]
    for position, name in enumerate(("config", "estimator")):
        if name in given:
            arguments[position]["model_dir"] = str(tmp_path)
    found = two_ranks.run(body_plain_estimator, *arguments)
    assert [folder for folder, _ in found] == [str(tmp_path), f"{tmp_path}/rank1"]
    assert all(min(threads) >= LEAST_INTER_OP_THREADS for _, threads in found)
    for folder in (tmp_path, tmp_path / "rank1"):
        assert tf.train.latest_checkpoint(str(folder)) == str(folder / "model.ckpt-2")
        assert len(list(folder.glob("events*"))) == 1


def body_threads(**given: int) -> tuple[Any, Any]:
    """Return the threads of the configuration of a session, and those that were chosen for the rank."""
    configs = [
        npu_config_proto(tf.compat.v1.ConfigProto(**given)),
        SessionConfigBuilder(tf.compat.v1.ConfigProto(**given)).session_config,
    ]
    of_configs = [
        (config.intra_op_parallelism_threads, config.inter_op_parallelism_threads)
        for config in configs
    ]
    threading = tf.config.threading
    chosen = (
        threading.get_intra_op_parallelism_threads(),
        threading.get_inter_op_parallelism_threads(),
    )
    return of_configs, chosen


def test_sessions_get_what_was_chosen_for_the_rank_unless_the_script_sets_it(
    two_ranks: Pool,
) -> None:
    for of_configs, chosen in two_ranks.run(body_threads):
        assert chosen[1] >= LEAST_INTER_OP_THREADS and of_configs == [chosen] * 2
    given = partial(body_threads, intra_op_parallelism_threads=7)
    for of_configs, chosen in two_ranks.run(given):
        assert of_configs == [(7, chosen[1])] * 2


# The session would make devices before the job is open.
UNOPENED = """
from npu_bridge.estimator.npu.npu_config import decorator_tf_session
make_session = decorator_tf_session(lambda config=None: config)
print("threads:", make_session().inter_op_parallelism_threads)
"""


def test_a_session_that_gets_its_configuration_opens_the_job(tmp_path: Path) -> None:
    for output in job.outputs(tmp_path, 2, UNOPENED):
        [threads] = re.findall(r"threads: (\d+)", output)
        assert int(threads) >= LEAST_INTER_OP_THREADS


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


def profile(path: str) -> None:
    with Profiler(output_path=path):
        tf.constant(1.0) + 1


def test_each_rank_writes_a_profile_of_its_own(two_ranks: Pool, tmp_path: Path) -> None:
    two_ranks.run(profile, str(tmp_path))
    for rank in (0, 1):
        assert list(tmp_path.glob(f"rank{rank}/**/*.xplane.pb"))
