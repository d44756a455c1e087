"""What ``npurun verify`` wraps of Keras and TensorFlow in its own processes, as soon as the script has imported them.

Optimizers, for the gradients that enter them after any reduction; models, for the rows of their batches; calls whose
line explains a difference. Noise is taken out: dropout, noise and augmentation layers pass their inputs on, shuffling
keeps the order, and batch normalisation that isn't synchronized uses its moving statistics.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.call import user_line
from npu_device._src.training.fit.current import current_step
from npu_device._src.verify.step_records import SCOPE, Recorder

_NOISY = (
    *("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout"),
    *("GaussianDropout", "GaussianNoise", "LSTM", "GRU", "SimpleRNN"),
)
_LAST_BIT = 2.0**-23  # of float32
_as_it_is = tf.autograph.experimental.do_not_convert


class Hooks:
    """The hooks of this process. TensorFlow's are installed at once, and it is seeded."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self._recorder = recorder
        self._numbers: dict[str, weakref.WeakKeyDictionary[Any, int]] = {}
        self._shuffles = 0
        self._inside = 0  # depth of models that call models
        tf.random.set_seed(seed)
        self._wrap(tf.data.Dataset, "shuffle", self._shuffle)
        self._wrap(tf.random, "set_seed", self._seeded)
        for owner, name in ((tf.nn, "compute_average_loss"), (tf, "clip_by_global_norm"), (tf, "clip_by_norm")):
            self._wrap(owner, name, functools.partial(self._noted, name))

    def install(self, module: Any) -> None:
        """Wrap the classes of a Keras package, or this package's own calls."""
        if module.__name__ == "npu_device.distribute":
            self._recorder.note("joined")
            self._wrap(module, "all_reduce", self._all_reduce)
        else:
            self._install_keras(module)

    def _install_keras(self, keras: Any) -> None:
        for owner, name in compat.gradient_entries(keras):
            self._wrap(owner, name, self._apply)
        self._wrap(keras.Model, "__call__", self._call_model)
        self._wrap(keras.Model, "fit", _without_shuffling)
        self._wrap(keras.Model, "compile", _without_compiler)
        self._wrap(keras.layers.Layer, "add_loss", self._add_loss)
        self._wrap(keras.layers.BatchNormalization, "call", self._normalise)
        for layer in noisy_layers(keras):
            layer.call = quiet(layer.call)
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
        names = [getattr(variable, "path", variable.name) for _, variable in trained]
        for operation in [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations():
            if "Random" in operation.type and SCOPE not in operation.name:
                self._recorder.note("random", what=operation.type, where=_line_of(operation))
        recorded = self._recorder.step(
            self._number("optimizer", optimizer),
            names,
            [gradient for gradient, _ in trained],
            [variable for _, variable in trained],
        )
        with tf.control_dependencies([] if recorded is None else [recorded]):
            return own(optimizer, gradients, *args, **kwargs)

    # Models

    def _call_model(self, own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not compat.a_tape_records():
            return own(model, *args, **kwargs)
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        step = current_step()
        self._recorder.rows(self._number("model", model), inputs, None if step is None else step.share.rows)
        changed = self._recorder.settings.perturbed
        if changed and args:
            args = (tf.nest.map_structure(in_the_last_bit, args[0]), *args[1:])
        self._inside += 1
        try:
            outputs = own(model, *args, **kwargs)
        finally:
            self._inside -= 1
        return tf.nest.map_structure(in_the_last_bit, outputs) if changed else outputs

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
        with tf.control_dependencies([] if recorded is None else [recorded]):
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


def _without_shuffling(own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs["shuffle"] = False
    return own(model, *args, **kwargs)


def _without_compiler(own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs["jit_compile"] = False  # XLA can't call Python
    return own(model, *args, **kwargs)


def in_the_last_bit(value: Any) -> Any:
    """Return a tensor of floats with another last bit in each; anything else as it is."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    signs = tf.random.stateless_uniform(tf.shape(value), [3, 5], dtype=tf.float32) - 0.5
    return value * tf.cast(1 + _LAST_BIT * tf.sign(signs), value.dtype)


def _line_of(operation: Any) -> str:
    """Return the innermost line of the script that has made an operation of a graph."""
    frames = [frame for frame in operation.traceback if "site-packages" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
