"""``NPUEstimator``. TensorFlow dropped Estimators in 2.16: then a call raises an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.tf1.hooks import NPUBroadcastGlobalVariablesHook
from npu_device._src.tf1.run_config import NPURunConfig, require_estimator
from npu_device._src.training.device import unless_child

_estimator = compat.estimator_module()
_Estimator: Any = _estimator.Estimator if _estimator else object
_EstimatorSpec: Any = _estimator.EstimatorSpec if _estimator else object


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

    All ranks train for the same number of steps. Each writes its checkpoints to its own ``model_dir``.

    Source: Ascend TF Adapter 1.x, ``npu_estimator.NPUEstimator``.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any] | None = None,
        model_dir: str | None = None,
        config: NPURunConfig | None = None,
        params: dict[str, Any] | None = None,
        job_start_file: str = "",
        warm_start_from: Any = None,
    ) -> None:
        require_estimator("NPUEstimator")
        if not isinstance(config, NPURunConfig):
            raise ValueError(f"NPUEstimator takes an NPURunConfig as config; found {config!r}")
        super().__init__(
            model_fn=model_fn, model_dir=model_dir, config=config, params=params, warm_start_from=warm_start_from
        )
        # TensorFlow refuses a subclass that overrides train.
        self.train = self._train_from_the_same_variables

    def _train_from_the_same_variables(
        self, input_fn: Callable[..., Any], hooks: Sequence[Any] | None = None, **keywords: Any
    ) -> Any:
        hooks = list(hooks or ())
        if unless_child() is not None and not self.config.horovod_mode:
            hooks.insert(0, NPUBroadcastGlobalVariablesHook(0))
        return super().train(input_fn, hooks=hooks, **keywords)


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
    made = tf.compat.v1.keras.estimator.model_to_estimator(
        keras_model=keras_model,
        keras_model_path=keras_model_path,
        custom_objects=custom_objects,
        model_dir=model_dir,
        checkpoint_format=checkpoint_format,
        config=config,
    )
    # The model's weights, which TensorFlow has written to a checkpoint, have no public name.
    return NPUEstimator(made.model_fn, made.model_dir, config, warm_start_from=compat.warm_start_of(made))
