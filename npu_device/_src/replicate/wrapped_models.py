"""Replicates each Keras model of a script at its first ``fit``, ``evaluate``, ``predict`` or ``…_on_batch``.

It wraps methods of the Keras classes, in a process whose user has asked for it.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import random
import sys
import weakref
from collections.abc import Sequence
from types import MethodType, ModuleType
from typing import Any, Callable

import numpy as np

from npu_device._src import environment
from npu_device._src.replicate.after_import import KERAS_PACKAGES

_TRAIN = ("fit", "evaluate", "predict")
_OF_MODELS = (*_TRAIN, "train_on_batch", "test_on_batch", "predict_on_batch")
_OTHER_CALLS = (
    "npu_device._api",
    "npu_device.distribute",
    "npu_device.horovod",
    "npu_bridge",
    "hccl",
    "horovod",
)
# Steps after which a loop of the script's own counts as training: a shorter one may only make slots.
_STEPS = 10
_PORT = "npurun port shows what to add to such a script, which then runs without --replicate."


class Models:
    """The models of this process. ``seed`` is that of all ranks, or None if random states have been set already."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        # Keras's methods, by the Model class.
        self._keras_methods: dict[type, dict[str, Callable]] = {}
        self._methods = weakref.WeakKeyDictionary[Any, dict[str, Any]]()
        # Models by their ids.
        self._models = weakref.WeakValueDictionary[int, Any]()
        self._is_open = False
        self._steps = 0  # steps that train the models outside of fit
        if seed is not None:
            random.seed(seed)
            # Cut to the 32 bits that numpy takes.
            np.random.seed(seed % (1 << 32))

    def imported(self, modules: Sequence[ModuleType]) -> None:
        """Open the job, and wrap the classes of the Keras packages among the modules."""
        names = {module.__name__ for module in modules}
        if "keras" in names and sys.modules["keras"].backend.backend() != "tensorflow":
            raise RuntimeError(
                f"--replicate: the Keras backend is {sys.modules['keras'].backend.backend()}, and ranks train together "
                "with TensorFlow only.\nWhat to do: set KERAS_BACKEND=tensorflow, in the script or outside of it."
            )
        if not self._is_open:
            self._open()
        from npu_device._src import compat

        for name in names.intersection(KERAS_PACKAGES):
            keras = sys.modules[name]
            originals = {method: getattr(keras.Model, method) for method in _OF_MODELS}
            self._keras_methods[keras.Model] = originals
            for method, original in originals.items():
                setattr(keras.Model, method, self._method(original))
            for owner, method in compat.gradient_methods(keras):
                setattr(owner, method, self._by_hand(getattr(owner, method)))
            keras.Model.__new__ = staticmethod(functools.partial(self._new, keras.Model.__new__))

    def _open(self) -> None:
        self._is_open = True
        import tensorflow as tf

        from npu_device._src.training.opening import device

        device.open()
        # Calls are refused from now on: npu_device itself has been imported before.
        sys.meta_path.insert(0, _NoOtherCalls())
        if self._seed is not None:
            tf.random.set_seed(self._seed)
            if environment.RANK_ID.get() in (0, None):
                print(
                    f"npurun --replicate: all ranks draw by the seed {self._seed}",
                    file=sys.stderr,
                    flush=True,
                )
        atexit.register(self._end)

    def _method(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            methods = self._replicated(model)
            method_of_model = methods.get(original.__name__, functools.partial(original, model))
            return method_of_model(*args, **kwargs)

        return method

    def _new(self, original: Callable, owner: type, *args: Any, **kwargs: Any) -> Any:
        model = original(owner, *args, **kwargs)
        self._models[id(model)] = model
        return model

    def _by_hand(self, original: Callable) -> Callable:
        """Return an optimizer method that refuses many steps outside of fit: of models, or before one is replicated."""
        import tensorflow as tf

        from npu_device._src import compat
        from npu_device._src.collectives.graph import call_now
        from npu_device._src.training.opening.current_world import world_unless_child
        from npu_device._src.world.current_step import current_step

        @functools.wraps(original)
        @compat.do_not_convert
        def apply(optimizer: Any, grads: Any, *args: Any, **keywords: Any) -> Any:
            # Steps inside fit are made by replicated models.
            if current_step() is None and world_unless_child() is not None:
                grads = list(grads)
                given_variables = args[:1] or [keywords.get("trainable_variables")]
                pairs = compat.gradients_and_variables(optimizer, grads, *given_variables)
                weights = set[int]()
                for model in list(self._models.values()):
                    weights.update(map(id, compat.variables_of(model)))
                if not self._methods or any(id(variable) in weights for _, variable in pairs):
                    if compat.of_keras_3(optimizer):
                        # The optimizer is built before the count, which may refuse the step, and outside of the
                        # function, where its variables would depend on the count.
                        with tf.init_scope():
                            compat.build_optimizer(optimizer, [variable for _, variable in pairs])
                    count = functools.partial(self._count, type(optimizer).__name__)
                    steps = 1
                    if compat.compiled_by_xla():
                        steps = _STEPS
                    counted = call_now(count, [steps], [tf.TensorSpec([], tf.int64)])
                    with tf.control_dependencies(counted):
                        return original(optimizer, grads, *args, **keywords)
            return original(optimizer, grads, *args, **keywords)

        return apply

    def _count(self, name: str, steps: Any) -> list:
        self._steps += int(steps)
        if self._steps >= _STEPS:
            raise RuntimeError(
                f"--replicate: {name} is used in a custom training loop, outside of fit; each rank would "
                f"train by itself.\nWhat to do: {_PORT}"
            )
        return [np.int64(self._steps)]

    def _replicated(self, model: Any) -> dict[str, Any]:
        """Replicate a model, unless it is, and return what then stands for Keras's methods."""
        if model not in self._methods:
            from npu_device._src.training.fit.replaced import Replaced
            from npu_device._src.training.fit.replica import replicate

            methods = next(
                candidates
                for owner, candidates in self._keras_methods.items()
                if isinstance(model, owner)
            )
            # On the model, the methods would hide the methods of a subclass, which call Keras's by ``super``; after an
            # error, also this one.
            with Replaced() as replaced:
                for name in _TRAIN:
                    replaced.set(model, name, MethodType(methods[name], model))
                replicate(model)
                self._methods[model] = {name: vars(model)[name] for name in _TRAIN}
        return self._methods[model]

    def _end(self) -> None:
        if not self._methods and environment.RANK_ID.get() in (0, None):
            sys.stderr.write(
                "npurun --replicate: the script called fit, evaluate or predict of no Keras model; each rank ran it by "
                f"itself.\nWhat to do: {_PORT}\n"
            )


class _NoOtherCalls(importlib.abc.MetaPathFinder):
    """Refuses what a script imports to train on many ranks by itself."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        if name not in _OTHER_CALLS:
            return
        way = "npurun, without --replicate"
        if "horovod" in name:
            way = "npurun --horovod"
        raise ImportError(
            f"--replicate: the script uses {name.replace('._api', '')}, and so reduces by itself what --replicate "
            f"would reduce.\nWhat to do: start it with {way}; or take these calls out."
        )
