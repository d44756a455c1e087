"""What ``npurun verify`` wraps of Keras and TensorFlow in its own processes, as soon as the script has imported them.

Optimizers, for the gradients that enter them after any reduction; models, for the rows of their batches; callbacks, for
the logs; calls whose line explains a difference. Noise is taken out: dropout, noise and augmentation layers pass their
inputs on, shuffling keeps the order, and batch normalisation that isn't synchronized uses its moving statistics.
"""

from __future__ import annotations

import functools
import inspect
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.tracebacks import is_users
from npu_device._src.collectives.call import user_line
from npu_device._src.training import training_state
from npu_device._src.training.fit.current import current_step
from npu_device._src.verify.session_runs import Sessions
from npu_device._src.verify.step_records import SCOPE, Recorder

_NOISY = (
    *("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout"),
    *("GaussianDropout", "GaussianNoise", "LSTM", "GRU", "SimpleRNN"),
)
_DRAWS = ("normal", "uniform", "truncated_normal", "categorical", "shuffle")
_ADAPTED = ("mean", "variance", "bin_boundaries")
_LAST_BIT = 2.0**-23  # of float32
_LAST_BITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of dtypes in which a model computes
_as_it_is = tf.autograph.experimental.do_not_convert


class Hooks:
    """The hooks of this process. TensorFlow's are installed at once, and it is seeded."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self._recorder = recorder
        self._numbers: dict[str, weakref.WeakKeyDictionary[Any, int]] = {}
        self._models: list[Any] = []
        self._states: dict[int, list[Any]] = {}
        self._shuffles = 0
        self._inside = 0  # depth of models that call models
        tf.random.set_seed(seed)
        self._wrap(tf.data.Dataset, "shuffle", self._shuffle)
        self._wrap(tf.random, "set_seed", self._seeded)
        for name in _DRAWS:
            self._wrap(tf.random, name, functools.partial(self._drawn, name))
        for owner, name in ((tf.nn, "compute_average_loss"), (tf, "clip_by_global_norm"), (tf, "clip_by_norm")):
            self._wrap(owner, name, functools.partial(self._noted, name))
        sessions = Sessions(recorder, seed)
        self._wrap(next(cls for cls in tf.compat.v1.Session.__mro__ if "run" in vars(cls)), "run", sessions.run)
        self._wrap(tf.Graph, "__init__", sessions.seed_graph)
        self._wrap(tf.compat.v1, "set_random_seed", self._seeded)

    def install(self, module: Any) -> None:
        """Wrap the classes of a Keras package, or this package's own calls."""
        if module.__name__ == "npu_device.distribute":
            self._wrap(module, "all_reduce", self._all_reduce)
        elif module is not tf:
            self._install_keras(module)

    def _install_keras(self, keras: Any) -> None:
        for owner, name in compat.gradient_entries(keras):
            self._wrap(owner, name, self._apply)
        self._wrap(keras.Model, "__call__", self._call_model)
        self._wrap(keras.Model, "fit", _with(shuffle=False))
        self._wrap(keras.Model, "compile", _with(jit_compile=False))  # XLA can't call Python
        self._wrap(keras.callbacks.CallbackList, "on_train_batch_end", self._batch_ended)
        self._wrap(keras.layers.Layer, "add_loss", self._add_loss)
        for owner, name in compat.loss_scale_entries(keras):  # a large scale overflows in other steps on each rank
            self._wrap(owner, name, _with(initial_scale=1.0))
        self._wrap(keras.layers.BatchNormalization, "call", self._normalise)
        for layer in noisy_layers(keras):
            layer.call = quiet(layer.call)
        for _, kind in inspect.getmembers(keras.layers, inspect.isclass):
            if "adapt" in vars(kind):
                self._wrap(kind, "adapt", self._adapt)
        self._wrap(keras.utils, "set_random_seed", self._seeded)

    def _wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        own = getattr(owner, name)

        @functools.wraps(own)
        @_as_it_is
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return hook(own, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _number(self, kind: str, thing: Any) -> int:
        known = self._numbers.setdefault(kind, weakref.WeakKeyDictionary())
        return known.setdefault(thing, len(known))

    # Optimizers

    def _apply(self, own: Any, optimizer: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(gradients)
        variables = args[0] if args else kwargs.get("trainable_variables")
        pairs = compat.gradients_and_variables(optimizer, gradients, variables)
        trained = [(gradient, variable) for gradient, variable in pairs if variable is not None]
        number = self._number("optimizer", optimizer)
        for operation in [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations():
            if "Random" in operation.type and SCOPE not in operation.name:
                self._recorder.note("random", what=operation.type, where=_line_of(operation))
        weights = [variable for _, variable in trained]
        weights = [*weights, *self._states.setdefault(number, _states(self._models, weights))]
        names = [getattr(variable, "path", variable.name) for variable in weights]
        recorded = self._recorder.step(number, names, [gradient for gradient, _ in trained], weights)
        with _after(recorded):
            return own(optimizer, gradients, *args, **kwargs)

    # Models

    def _call_model(self, own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not compat.a_tape_records():
            return own(model, *args, **kwargs)
        if not any(each is model for each in self._models):
            self._models.append(model)
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        step = current_step()
        self._recorder.rows(self._number("model", model), inputs, None if step is None else step.share.rows)
        changed = functools.partial(in_the_last_bit, last_bit=_LAST_BITS.get(model.compute_dtype, _LAST_BIT))
        is_changed = self._recorder.settings.perturbed
        if is_changed and args:
            args = (tf.nest.map_structure(changed, args[0]), *args[1:])
        self._inside += 1
        try:
            outputs = own(model, *args, **kwargs)
        finally:
            self._inside -= 1
        return tf.nest.map_structure(changed, outputs) if is_changed else outputs

    def _add_loss(self, own: Any, layer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        rank = getattr(getattr(loss, "shape", None), "rank", None) if not callable(loss) else None
        if rank:
            self._recorder.note("add_loss", shape=str(loss.shape))
        return own(layer, loss, *args, **kwargs)

    def _normalise(self, own: Any, layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(layer, "synchronized", False):
            return own(layer, inputs, *args, **kwargs)
        self._recorder.note("batch_norm", layer=layer.name)
        kwargs["training"] = False
        return own(layer, inputs, **kwargs)

    def _batch_ended(self, own: Any, callbacks: Any, batch: Any, logs: Any = None) -> Any:
        logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self._recorder.logs(logs)
        return own(callbacks, batch, logs)

    def _adapt(self, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(layer, *args, **kwargs)
        state = [getattr(layer, name) for name in _ADAPTED if getattr(layer, name, None) is not None]
        if hasattr(layer, "get_vocabulary"):
            state = [zlib.crc32(repr(layer.get_vocabulary()).encode())]
        sizes = [float(np.linalg.norm(np.asarray(value, np.float64))) for value in state]
        self._recorder.note("adapted", layer=layer.name, state=sizes)
        return result

    # Data and randomness

    def _shuffle(self, own: Any, dataset: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        number, self._shuffles = self._shuffles, self._shuffles + 1
        seed = None if seed is None else int(seed)
        self._recorder.note("shuffle", number=number, seed=seed)
        if seed is not None and self._recorder.settings.ranks > 1 and seed != self._recorder.other_seed(number):
            return own(dataset, buffer_size, seed, *args, **kwargs)  # another seed than that of the single process
        return dataset

    def _seeded(self, own: Any, seed: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.note("seed", seed=None if seed is None else int(seed))
        return own(seed, *args, **kwargs)

    def _drawn(self, name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and compat.a_tape_records():
            self._recorder.note("random", what=f"tf.random.{name}", where=user_line())
        return own(*args, **kwargs)

    def _noted(self, kind: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.note(kind, keywords=sorted(kwargs))
        return own(*args, **kwargs)

    # This package

    def _all_reduce(self, own: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        line = user_line()
        tensors = [value for value in tf.nest.flatten(values) if value is not None]
        reduction = args[0] if args else kwargs.get("reduction", "mean")
        self._recorder.note("all_reduce", reduction=str(reduction), values=len(tensors))
        recorded = self._recorder.reduced(tensors, line)
        with _after(recorded):
            return own(values, *args, **kwargs)


def noisy_layers(keras: Any) -> list[Any]:
    """Return the classes of layers that draw random numbers in training."""
    names = [name for name in dir(keras.layers) if name in _NOISY or name.startswith("Random")]
    return [getattr(keras.layers, name) for name in names]


def quiet(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``call`` of a layer as it is outside training; the same if it is synchronized."""

    @functools.wraps(call)
    @_as_it_is
    def called(layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(layer, "synchronized", False):
            return call(layer, inputs, *args, **kwargs)
        kwargs["training"] = False
        return call(layer, inputs, **kwargs)

    return called


def _after(recorded: Any) -> Any:
    """Return the context of what follows a recording. A function orders it by itself, and may make variables there."""
    return tf.control_dependencies([] if recorded is None or tf.inside_function() else [recorded])


def _with(**fixed: Any) -> Callable[..., Any]:
    """Return a hook that fixes some arguments."""
    return lambda own, *args, **kwargs: own(*args, **{**kwargs, **fixed})


def _states(models: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
    """Return the variables of models that steps can change, but that no optimizer trains."""
    known = {id(variable) for variable in trained}
    found = [weight for model in models for weight in model.weights if not weight.trainable]
    found += [variable for model in models for variable in training_state.loose_variables(model)]
    return [each for each in found if id(each) not in known and tf.as_dtype(each.dtype).is_floating]


def in_the_last_bit(value: Any, last_bit: float = _LAST_BIT) -> Any:
    """Return a tensor of floats with another last bit in each; anything else as it is."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    signs = tf.random.stateless_uniform(tf.shape(value), [3, 5], dtype=tf.float32) - 0.5
    return value * tf.cast(1 + last_bit * tf.sign(signs), value.dtype)


def _line_of(operation: Any) -> str:
    """Return the innermost line of the script that has made an operation of a graph."""
    frames = [frame for frame in operation.traceback if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
