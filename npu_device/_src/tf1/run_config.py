"""``NPURunConfig``, the configuration of ``NPUEstimator``, and the small classes that go into it.

It can be made under every TensorFlow; where TensorFlow has Estimators it is one of their ``RunConfig``.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.tf1.config import add_resources, npu_session_config_init, set_option
from npu_device._src.tf1.hooks import NPUBroadcastGlobalVariablesHook
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.opening.device import unless_child
from npu_device._src.world.world import World

_estimator = compat.estimator_module()
# Without Estimators the classes stand for themselves, so that scripts can still be imported.
_RunConfig: Any = getattr(_estimator, "RunConfig", object)
_Estimator: Any = getattr(_estimator, "Estimator", object)
_EstimatorSpec: Any = getattr(_estimator, "EstimatorSpec", object)

# The parameters stand in Ascend's order, since scripts may give them by position.
_DEFAULTS = """
iterations_per_loop=1 profiling_config=None model_dir=None tf_random_seed=None save_summary_steps=0
save_checkpoints_steps=None save_checkpoints_secs=None session_config=None keep_checkpoint_max=5
keep_checkpoint_every_n_hours=10000 log_step_count_steps=100 distribute=None enable_data_pre_proc=True
precision_mode=None enable_reduce_precision=False variable_format_optimize=None mix_compile_mode=False
hcom_parallel=True graph_memory_max_size=None variable_memory_max_size=None dump_config=None
stream_max_parallel_num=None is_tailing_optimization=False horovod_mode=False graph_run_mode=1 op_debug_level=None
enable_scope_fusion_passes=None enable_exception_dump=2 op_select_implmode=None optypelist_for_implmode=None
dynamic_input_config=None aoe_mode=None work_path=None buffer_optimize='l2_optimize' enable_small_channel=0
fusion_switch_file=None enable_compress_weight=False compress_weight_conf=None op_compiler_cache_mode=None
op_compiler_cache_dir=None debug_dir=None hcom_multi_mode=False dynamic_input=None
dynamic_graph_execute_mode='dynamic_execute' dynamic_inputs_shape_range=None train_distribute=None
eval_distribute=None local_rank_id=None local_device_list=None session_device_id=None distribute_config=None
modify_mixlist=None op_precision_mode=None device_type='default_device_type' soc_config=None hccl_timeout=None
op_wait_timeout=None op_execute_timeout=None HCCL_algorithm=None customize_dtypes=None op_debug_config=None
memory_config=None experimental_config=None topo_sorting_mode=None aoe_config_file=None insert_op_file=None
stream_sync_timeout=-1 event_sync_timeout=-1 external_weight=False deterministic=0 frozen_variable=False
variable_placement='Device' jit_compile='auto' precision_mode_v2=None ac_parallel_enable=None quant_dumpable=None
input_fusion_size=131072 compile_dynamic_mode=None graph_max_parallel_model_num=1 export_compile_stat=1
aicore_num=None oo_constant_folding=True input_batch_cpy=False shape_generalization_mode='STRICT'
all_tensor_not_empty=False auto_multistream_parallel_mode=None oo_level='O3' optimization_switch=None
"""
_PAIRS = (pair.partition("=") for pair in _DEFAULTS.split())
_ARGUMENTS: dict[str, Any] = {name: ast.literal_eval(default) for name, _, default in _PAIRS}
_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PARAMETERS = [
    inspect.Parameter(name, _BY_POSITION, default=default) for name, default in _ARGUMENTS.items()
]


@dataclass
class ProfilingConfig:
    """Tracing of the training: the options ``profiling_config`` of ``npu.global_options()``.

    Args:
        enable_profiling: trace, False unless given.
        profiling_options: what to trace: JSON, or a list such as ``["training_trace", "task_trace"]``, as in older
            releases.
        enable_options: older name of ``profiling_options``.

    Source: Ascend TF Adapter 1.x, ``npu_config.ProfilingConfig``.
    """

    enable_profiling: bool = False
    profiling_options: str | Sequence[str] | None = None
    enable_options: str | Sequence[str] | None = None

    def as_json(self) -> str | None:
        """Return the options as JSON; None when there are none."""
        wanted = self.profiling_options or self.enable_options
        if not wanted:
            return None
        if isinstance(wanted, str):
            return wanted
        return json.dumps({"output": "./", **dict.fromkeys(wanted, "on")})


@dataclass
class DumpConfig:
    """Dumping of the operators of the NPU; accepted, without effect.

    Args:
        enable_dump, dump_path, dump_step, dump_mode, dump_data, dump_layer, enable_dump_debug, dump_debug_mode:
        recorded.

    Source: Ascend TF Adapter 1.x, ``npu_config.DumpConfig``.
    """

    enable_dump: bool = False
    dump_path: str | None = None
    dump_step: str | None = None
    dump_mode: str = "output"
    enable_dump_debug: bool = False
    dump_debug_mode: str = "all"
    dump_data: str = "tensor"
    dump_layer: str | None = None


@dataclass
class MemoryConfig:
    """The memory of the NPU; accepted, without effect.

    Args:
        atomic_clean_policy, static_memory_policy, memory_optimization_policy, variable_use_1g_huge_page: recorded.

    Source: Ascend TF Adapter 1.x, ``npu_config.MemoryConfig``.
    """

    atomic_clean_policy: int = 0
    static_memory_policy: int = 0
    memory_optimization_policy: str | None = None
    variable_use_1g_huge_page: int = 0


@dataclass
class DynamicInputConfig:
    """Shapes to compile for; accepted, without effect: TensorFlow handles varying shapes anyway.

    Args:
        input_shape, dynamic_dims, dynamic_node_type, compile_hybrid_mode: recorded.

    Source: Ascend TF Adapter 1.x, ``npu_config.DynamicInputConfig``.
    """

    input_shape: str
    dynamic_dims: str
    dynamic_node_type: int
    compile_hybrid_mode: int | None = None


class NpuExecutePlacement(enum.Enum):
    """Engines of an NPU, for ``npu_scope.npu_variable_scope``; without effect.

    Source: Ascend TF Adapter 1.x, ``npu_config.NpuExecutePlacement``.
    """

    ALL = "ALL"
    CUBE = "CUBE"
    VECTOR = "VECTOR"
    TAISHAN = "TAISHAN"
    DVPP = "DVPP"
    HOST = "HOST"


class NPURunConfig(_RunConfig):
    """Configuration of ``NPUEstimator``.

    Args:
        arguments, keywords: Ascend's, in their order. Each becomes an attribute of the same name, and so do keywords
            that this package doesn't know. TensorFlow's own (``model_dir``, ``save_checkpoints_steps``,
            ``session_config`` …) have TensorFlow's meaning; a checkpoint is kept every 100 steps when neither steps
            nor seconds are given.
            ``hcom_parallel``, ``profiling_config``, ``aoe_mode``, ``aoe_config_file`` and ``work_path`` count as the
            options of ``npu.global_options()``; ``horovod_mode`` keeps ``NPUEstimator`` from broadcasting. The others
            are recorded.

    Raises:
        ValueError: ``iterations_per_loop`` isn't an integer from 1, or isn't 1 together with ``mix_compile_mode``;
            ``graph_run_mode`` isn't 0 or 1; what TensorFlow's ``RunConfig`` refuses.
        TypeError: ``mix_compile_mode`` isn't a bool or ``jit_compile`` no string; an argument is given twice.

    Other ranks see nothing of it.

    Source: Ascend TF Adapter 1.x, ``npu_config.NPURunConfig``.
    """

    # The signature is what ``help()`` and ``inspect.signature`` show.
    __signature__ = inspect.Signature(
        [*_PARAMETERS, inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)]
    )

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        passed = self.__signature__.bind(*arguments, **keywords).arguments
        # Keywords that this package doesn't know are one argument there.
        passed.update(passed.pop("keywords", {}))
        settings = {**_ARGUMENTS, **passed}
        _check(settings)
        if settings["save_checkpoints_steps"] is None and settings["save_checkpoints_secs"] is None:
            # The default is Ascend's, and counts only where the user hasn't given seconds.
            settings["save_checkpoints_steps"] = 100
        if settings["session_config"] is not None:
            settings["session_config"] = npu_session_config_init(settings["session_config"])
        # Options are set only by what the script has passed: a default must not overwrite one that is set.
        for name in passed:
            set_option(name, settings[name])
        if settings["profiling_config"] is not None:
            set_option("profiling_mode", settings["profiling_config"].enable_profiling)
            set_option("profiling_options", settings["profiling_config"].as_json())
        if _estimator:
            # TensorFlow's RunConfig would take the variable to mean servers; here each rank has sessions of its own.
            with environment.TF_CONFIG.hidden():
                theirs = inspect.signature(_RunConfig).parameters.keys() & settings.keys()
                super().__init__(**{name: settings.pop(name) for name in theirs})
        # What remains are Ascend's own settings, which scripts read as attributes.
        self.__dict__.update(settings)


def npu_run_config_init(run_config: Any = None) -> Any:
    """Return a changed copy of a ``RunConfig``, whose session configuration is that of ``npu_session_config_init``.

    Args:
        run_config: a ``tf.estimator.RunConfig``; anything else counts as a new one.

    Raises:
        NotImplementedError: this TensorFlow has no Estimator.
        RuntimeError: the job can't be joined, as in ``npu.open``.

    With several ranks, an Estimator with it writes to the same folders as ``NPUEstimator``.

    Source: Ascend TF Adapter 1.x, ``npu_run_config_init``.
    """
    require_estimator("npu_run_config_init")
    if not isinstance(run_config, _RunConfig):
        with environment.TF_CONFIG.hidden():
            run_config = _RunConfig()
    session_config = npu_session_config_init(run_config.session_config)
    # Opened after the parameters have become options, which can't change any more then.
    job = unless_child()
    add_resources(session_config)
    config = run_config.replace(session_config=session_config)
    if job is not None and not compat.has_folder(config):
        compat.set_folder(config, _folder_of_rank)
    return config


def require_estimator(name: str) -> None:
    """Raise NotImplementedError, with the ways out, where TensorFlow no longer has ``tf.estimator``."""
    if _estimator is None:
        raise NotImplementedError(
            f"{name} depends on tf.estimator, which TensorFlow dropped with 2.16; this is TensorFlow "
            f"{tf.__version__}.\n"
            "What to do: run the script with TensorFlow 2.15 (pip install 'tensorflow==2.15.*', Python 3.9 to 3.11), "
            "or train with tf.compat.v1.train.MonitoredTrainingSession or with Keras."
        )


def _check(settings: dict[str, Any]) -> None:
    loops = settings["iterations_per_loop"]
    if not isinstance(loops, int) or isinstance(loops, bool) or loops < 1:
        raise ValueError(f"iterations_per_loop must be an integer of at least 1; found {loops!r}")
    if not isinstance(settings["mix_compile_mode"], bool):
        raise TypeError(
            f"mix_compile_mode must be True or False; found {settings['mix_compile_mode']!r}"
        )
    if settings["mix_compile_mode"] and loops != 1:
        raise ValueError(f"iterations_per_loop must be 1 with mix_compile_mode; found {loops}")
    if settings["graph_run_mode"] not in (0, 1):
        raise ValueError(
            f"graph_run_mode must be 0 (inference) or 1 (training); found {settings['graph_run_mode']!r}"
        )
    if not isinstance(settings["jit_compile"], str):
        raise TypeError(
            f"jit_compile must be a string, 'true', 'false' or 'auto'; found {settings['jit_compile']!r}"
        )


def _of_this_rank(model_dir: str | None, config: Any) -> tuple[str | None, Any]:
    """Return the folder in which this rank writes checkpoints, and the configuration with it and the rank's devices."""
    world = world_unless_child()
    if world is None or compat.has_folder(config):
        return model_dir, config
    session_config = config.session_config
    if session_config is None:
        # As TensorFlow's Estimator makes it.
        session_config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    add_resources(session_config)
    config = config.replace(session_config=session_config)
    shared = model_dir or config.model_dir
    if shared is None:
        return model_dir, config
    folder = _folder_of_rank(shared)
    if folder == shared:
        return model_dir, config
    return folder, config.replace(model_dir=folder)


def _folder_of_rank(shared: str) -> str:
    """Return the folder in which this rank writes checkpoints, given that of all ranks.

    Two ranks can't write to one folder: TensorFlow gives the temporary files of both the same names. No other rank is
    contacted, as a script may make an estimator on some ranks only, to evaluate or to predict.
    """
    world = world_unless_child()
    if world is None or world.is_main or os.path.basename(shared) == _folder_name(world):
        return shared
    folder = os.path.join(shared, _folder_name(world))
    _copy_newest(shared, folder)
    return folder


def _folder_name(world: World) -> str:
    return f"rank{world.rank}"


def _copy_newest(shared: str, folder: str) -> None:
    """Copy the newest checkpoint of rank 0 to the folder of this rank, if there is one and the newest here differs."""
    newest = tf.train.latest_checkpoint(shared)
    own_newest = tf.train.latest_checkpoint(folder)
    if newest is None or (own_newest is not None and _index_of(own_newest) == _index_of(newest)):
        return
    tf.io.gfile.makedirs(folder)
    copied = os.path.join(folder, os.path.basename(newest))
    for path in tf.io.gfile.glob(f"{newest}.*"):
        tf.io.gfile.copy(path, os.path.join(folder, os.path.basename(path)), overwrite=True)
    tf.compat.v1.train.update_checkpoint_state(folder, copied)


def _resumed_step(world: World, folder: str) -> int:
    """Return the step of rank 0's newest checkpoint, -1 without one; every rank calls this when a training begins.

    The folder of rank 0 decides: where this rank's newest checkpoint is another one, for instance after a job with
    fewer ranks, that of rank 0 is copied if this rank sees it, or else this rank begins without any.
    """
    own_step = _step_of(tf.train.latest_checkpoint(folder))
    root_step: int = world.object_from_root(own_step)
    shared, name = os.path.split(folder)
    follows = name == _folder_name(world) and not world.is_main
    if follows and _step_of(tf.train.latest_checkpoint(shared)) == root_step:
        _copy_newest(shared, folder)
        own_step = _step_of(tf.train.latest_checkpoint(folder))
    if own_step not in (-1, root_step):
        tf.io.gfile.remove(os.path.join(folder, "checkpoint"))
    # Rank 0 writes its checkpoint anew when it begins, and the others may still copy it.
    world.wait()
    return root_step


def _index_of(checkpoint: str) -> bytes:
    """Return the step, and what has checksums of all variables."""
    with tf.io.gfile.GFile(f"{checkpoint}.index", "rb") as index:
        return checkpoint.rpartition("-")[2].encode() + index.read()


def _step_of(checkpoint: str | None) -> int:
    """Return the step in the name of a checkpoint; -1 without one."""
    step = (checkpoint or "").rpartition("-")[2]
    if not step.isdigit():
        return -1
    return int(step)


class NPUEstimator(_Estimator):
    """An Estimator with an ``NPURunConfig``.

    Args:
        model_fn, model_dir, params, warm_start_from: as for ``tf.estimator.Estimator``.
        config: an ``NPURunConfig``. With several ranks ``train`` begins with the global variables of rank 0 on all of
            them, unless ``horovod_mode`` is set. ``iterations_per_loop`` is recorded: each ``session.run`` is one step,
            and the training is the same.
        job_start_file: without effect.

    Raises:
        ValueError: ``config`` is something else.
        NotImplementedError: this TensorFlow has no Estimator.

    All ranks train for the same number of steps, from the newest checkpoint of rank 0. Rank 0 has its checkpoints in
    ``model_dir``, rank 1 in its folder ``rank1``, and so on. Only ``train`` contacts the other ranks.

    Source: Ascend TF Adapter 1.x, ``npu_estimator.NPUEstimator``.
    """

    def __init__(
        self,
        model_fn: Callable | None = None,
        model_dir: str | None = None,
        config: NPURunConfig | None = None,
        params: dict[str, Any] | None = None,
        job_start_file: str = "",
        warm_start_from: Any = None,
    ) -> None:
        require_estimator("NPUEstimator")
        if not isinstance(config, NPURunConfig):
            raise ValueError(f"NPUEstimator takes an NPURunConfig as config; found {config!r}")
        model_dir, config = _of_this_rank(model_dir, config)
        super().__init__(
            model_fn=model_fn,
            model_dir=model_dir,
            config=config,
            params=params,
            warm_start_from=warm_start_from,
        )
        # TensorFlow refuses a subclass that overrides ``train``, so the object gets the method.
        self.train = self._train_from_the_same_variables

    def _train_from_the_same_variables(
        self,
        input_fn: Callable,
        hooks: Sequence | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence | None = None,
    ) -> Any:
        hooks = list(hooks or ())
        world = world_unless_child()
        if world is not None:
            step = _resumed_step(world, self.model_dir)
            # A rank without the checkpoint would train alone where rank 0 finds nothing left to do.
            if steps is None and 0 < (max_steps or 0) <= step:
                return self
            if not self.config.horovod_mode:
                # The hook comes first, so that the other hooks find the variables of the root.
                hooks.insert(0, NPUBroadcastGlobalVariablesHook(0))
        return super().train(input_fn, hooks, steps, max_steps, saving_listeners)


class NPUEstimatorSpec(_EstimatorSpec):
    """The result of a ``model_fn``.

    Args:
        mode, arguments, keywords: as for ``tf.estimator.EstimatorSpec``.
        host_call: recorded as an attribute; Ascend runs it on the host.

    Raises:
        NotImplementedError: this TensorFlow has no Estimator.

    Source: Ascend TF Adapter 1.x, ``npu_estimator.NPUEstimatorSpec``.
    """

    def __new__(cls, mode: str, *arguments: Any, host_call: Any = None, **keywords: Any) -> Any:
        require_estimator("NPUEstimatorSpec")
        # By position, Ascend's argument comes after TensorFlow's arguments.
        if len(arguments) == len(cls._fields):
            *arguments, host_call = arguments  # type: ignore[assignment]
        spec = super().__new__(cls, mode, *arguments, **keywords)
        spec.host_call = host_call
        return spec


def model_to_npu_estimator(
    keras_model: Any = None,
    keras_model_path: str | None = None,
    custom_objects: dict[str, Any] | None = None,
    model_dir: str | None = None,
    checkpoint_format: str = "saver",
    config: NPURunConfig | None = None,
    job_start_file: str = "",
) -> NPUEstimator:
    """Return an ``NPUEstimator`` of a compiled Keras model.

    Args:
        keras_model, keras_model_path, custom_objects, model_dir, checkpoint_format: as for
            ``tf.keras.estimator.model_to_estimator``.
        config: as for ``NPUEstimator``.
        job_start_file: without effect.

    Raises:
        ValueError: ``config`` is no ``NPURunConfig``; what TensorFlow refuses.
        NotImplementedError: this TensorFlow has no Estimator.

    Source: Ascend TF Adapter 1.x, ``keras_to_npu.model_to_npu_estimator``.
    """
    require_estimator("model_to_npu_estimator")
    if isinstance(config, NPURunConfig):
        # The first checkpoint is written here.
        model_dir, config = _of_this_rank(model_dir, config)
    estimator = tf.compat.v1.keras.estimator.model_to_estimator(
        keras_model=keras_model,
        keras_model_path=keras_model_path,
        custom_objects=custom_objects,
        model_dir=model_dir,
        checkpoint_format=checkpoint_format,
        config=config,
    )
    # The model's weights, which TensorFlow has written to a checkpoint, have no public name.
    return NPUEstimator(
        estimator.model_fn,
        estimator.model_dir,
        config,
        warm_start_from=compat.warm_start_of(estimator),
    )
