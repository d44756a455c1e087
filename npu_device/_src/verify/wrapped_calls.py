"""What ``npurun verify`` wraps of Keras and TensorFlow in its own processes, as soon as the script has imported them.

Optimizers, for the gradients that enter them after any reduction; models, for the rows of their batches; callbacks, for
the logs; calls whose line explains a difference. Noise is taken out: dropout, noise and augmentation layers pass their
inputs on, shuffling keeps the order, and batch normalisation that isn't synchronized uses its moving statistics.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.tracebacks import is_users
from npu_device._src.collectives.call import user_line
from npu_device._src.gradients.reduction import WIRE_DTYPES
from npu_device._src.training import training_state
from npu_device._src.training.fit.current import current_step
from npu_device._src.verify.step_recorder import SCOPE, Recorder

_NOISY = (
    *("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout"),
    *("GaussianDropout", "GaussianNoise", "LSTM", "GRU", "SimpleRNN"),
)
_DRAWS = ("normal", "uniform", "truncated_normal", "categorical", "shuffle")
_ADAPTED = ("mean", "variance", "bin_boundaries")
_LAST_BITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of dtypes in which a model computes
_LAST_BIT = 2.0**-23  # of float32
_MUCH = 0.125  # by which inputs of ranks differ where nothing is compared with one process
_as_it_is = tf.autograph.experimental.do_not_convert


class Hooks:
    """The hooks of this process. TensorFlow's are installed at once, and it is seeded."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self._recorder = recorder
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of optimizers
        self._models: list[Any] = []
        self._states: dict[str, list[Any]] = {}
        self._shuffles = 0
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._warned  # type: ignore[method-assign]
        logging.getLogger("npu_device").addHandler(handler)
        self._unseeded: list[tuple[Any, str]] = []  # datasets that were to be shuffled without a seed, and the line
        self._inside = 0  # depth of models that call models
        WIRE_DTYPES.update(dict.fromkeys(WIRE_DTYPES))  # no compression, which rounds
        tf.random.set_seed(seed)
        tf.compat.v1.get_default_graph().seed = self._seed = seed
        session = next(kind for kind in tf.compat.v1.Session.__mro__ if "run" in vars(kind))
        hooks: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (tf.data.Dataset, "shuffle", self._shuffle),
            (tf.GradientTape, "gradient", self._gradient),
            (tf.Graph, "__init__", self._seed_graph),
            (session, "run", self._run),
            (tf.compat.v1.train.Optimizer, "apply_gradients", self._apply_in_session),
            *((tf.random, name, functools.partial(self._drawn, name)) for name in _DRAWS),
        )
        for owner, name, hook in hooks:
            _wrap(owner, name, hook)
        for owner, name in ((tf.random, "set_seed"), (tf.compat.v1, "set_random_seed")):
            self._note_calls(owner, name, "seed")
        for owner, name in ((tf.nn, "compute_average_loss"), (tf, "clip_by_global_norm"), (tf, "clip_by_norm")):
            self._note_calls(owner, name, name)

    def install(self, module: Any) -> None:
        """Wrap the classes of a Keras package, or the calls of this package."""
        if module.__name__ == "npu_device.distribute":
            _wrap(module, "all_reduce", self._all_reduce)
            _wrap(module, "shard_and_rebatch_dataset", self._divide)
        elif module is not tf:
            self._install_keras(module)

    def _install_keras(self, keras: Any) -> None:
        for owner, name in compat.gradient_entries(keras):
            _wrap(owner, name, self._apply)
        for owner, name in compat.loss_scale_entries(keras):  # a large scale overflows in other steps on each rank
            _wrap(owner, name, _with(initial_scale=1.0))
        _wrap(keras.Model, "__call__", self._call_model)
        _wrap(keras.Model, "fit", _with(shuffle=False))
        _wrap(keras.Model, "compile", _with(jit_compile=False))  # XLA can't call Python
        _wrap(keras.callbacks.CallbackList, "on_train_batch_end", self._batch_ended)
        _wrap(keras.layers.Layer, "add_loss", self._add_loss)
        for layer in noisy_layers(keras):
            layer.call = quiet(layer.call)
        normalisation = keras.layers.BatchNormalization
        normalisation.call = quiet(
            normalisation.call, lambda layer: self._recorder.note("batch_norm", layer=layer.name)
        )
        for _, kind in inspect.getmembers(keras.layers, inspect.isclass):
            if "adapt" in vars(kind):
                _wrap(kind, "adapt", self._adapt)
        self._note_calls(keras.utils, "set_random_seed", "seed")

    # Optimizers

    def _apply(self, own: Any, optimizer: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(gradients)
        variables = args[0] if args else kwargs.get("trainable_variables")
        pairs = compat.gradients_and_variables(optimizer, gradients, variables)
        with self._recorded(optimizer, pairs):
            return own(optimizer, gradients, *args, **kwargs)

    def _apply_in_session(self, own: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(pairs)
        with self._recorded(optimizer, pairs):
            return own(optimizer, pairs, *args, **kwargs)

    def _recorded(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Record gradients and weights; return the context of the update."""
        gradients, trained = zip(*[pair for pair in pairs if pair[1] is not None])
        name = self._names.setdefault(optimizer, f"optimizer {len(self._names)}")
        self._recorder.optimizers.setdefault(name, 0)
        for operation in [] if tf.executing_eagerly() else _leading_to(gradients):
            if "Random" in operation.type and SCOPE not in operation.name:
                self._recorder.note("random", _line_of(operation), what=operation.type)
        weights = [*trained, *self._states.setdefault(name, _states(self._models, trained))]
        names = [getattr(variable, "path", variable.name) for variable in weights]
        after = self._recorder.before(
            [*gradients, *weights],
            lambda *arrays: self._recorder.step(name, names, arrays[: len(trained)], arrays[len(trained) :]),
        )
        # A function reads variables before it changes them, and an optimizer may make some there.
        return contextlib.nullcontext() if tf.inside_function() else after

    def _gradient(self, own: Any, tape: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(tape, *args, **kwargs)
        if self._by_horovod():
            self._recorder.before(tf.nest.flatten(found), self._recorder.own)
        return found

    def _by_horovod(self) -> bool:
        """Return True if the script has called Horovod's ``init``."""
        face = sys.modules.get("npu_device._src.horovod.process")
        self._recorder.record.horovod |= bool(face and face.is_initialized())
        return self._recorder.record.horovod

    # Models

    def _call_model(self, own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not compat.a_tape_records():
            return own(model, *args, **kwargs)
        if not any(each is model for each in self._models):
            self._models.append(model)
        step, process = current_step(), self._recorder.process
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        tensors = [each for each in tf.nest.flatten(inputs, expand_composites=True) if isinstance(each, tf.Tensor)]
        # What another model has made isn't a sample.
        count = 0 if compat.are_recorded(tensors) else step and step.share.rows * tf.cast(step.share.counts, tf.int32)
        with self._recorder.rows(inputs, count):
            if args and not tf.executing_eagerly():  # else a function may count the rows in the next step
                args = (tf.nest.map_structure(_identity, args[0]), *args[1:])
        last_bit, record = _LAST_BITS.get(model.compute_dtype, _LAST_BIT), self._recorder.record
        record.last_bit = max(record.last_bit, last_bit)
        by = last_bit if process.perturbed else 0.0
        if self._by_horovod():  # so that each rank has gradients of its own
            by = _MUCH
        change = functools.partial(changed, by=by, seed=process.rank)
        if by and args:
            args = (tf.nest.map_structure(change, args[0]), *args[1:])
        self._inside += 1
        try:
            outputs = own(model, *args, **kwargs)
        finally:
            self._inside -= 1
        return tf.nest.map_structure(change, outputs) if by else outputs

    def _add_loss(self, own: Any, layer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if not callable(loss) and getattr(getattr(loss, "shape", None), "rank", None):
            self._recorder.note("add_loss")
        return own(layer, loss, *args, **kwargs)

    def _batch_ended(self, own: Any, callbacks: Any, batch: Any, logs: Any = None) -> Any:
        logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self._recorder.logs(logs)
        return own(callbacks, batch, logs)

    def _adapt(self, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(layer, *args, **kwargs)
        state: Any = [np.array(getattr(layer, name, None)).tolist() for name in _ADAPTED]
        if hasattr(layer, "get_vocabulary"):
            state = layer.get_vocabulary()
        self._recorder.note("adapted", layer=layer.name, state=zlib.crc32(repr(state).encode()))
        return result

    def _run(self, own: Any, session: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        steps = len(self._recorder.record.steps)
        result = own(session, fetches, *args, **kwargs)
        if len(self._recorder.record.steps) > steps:
            numbers = [float(each) for each in tf.nest.flatten(result) if isinstance(each, np.floating)]
            self._recorder.logs({f"fetched number {place}": value for place, value in enumerate(numbers)})
        return result

    # Data and randomness

    def _seed_graph(self, own: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        own(graph, *args, **kwargs)
        if type(graph) is tf.Graph:
            graph.seed = self._seed

    def _shuffle(self, own: Any, dataset: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        number, self._shuffles = self._shuffles, self._shuffles + 1
        seed = None if seed is None else int(seed)
        self._recorder.note("shuffle", number=number, seed=seed)
        if seed is not None and self._recorder.process.ranks > 1 and seed != self._recorder.other_seed(number):
            return own(dataset, buffer_size, seed, *args, **kwargs)  # another seed than that of the single process
        if seed is None and not self._recorder.record.of("seed"):
            dataset = dataset.take(-1)
            self._unseeded.append((dataset, user_line()))
        return dataset

    def _divide(self, own: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        parts = list(compat.datasets_of(dataset))
        for unseeded, line in self._unseeded:
            if any(part is unseeded for part in parts):
                self._recorder.note("unseeded", line)
        return own(dataset, *args, **kwargs)

    def _drawn(self, name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and compat.a_tape_records():
            self._recorder.note("random", what=f"tf.random.{name}")
        return own(*args, **kwargs)

    def _note_calls(self, owner: Any, name: str, kind: str) -> None:
        def noted(own: Any, *args: Any, **kwargs: Any) -> Any:
            self._recorder.note(kind)
            return own(*args, **kwargs)

        _wrap(owner, name, noted)

    # This package

    def _warned(self, record: logging.LogRecord) -> None:
        self._recorder.note("warning", "", what=" ".join(record.getMessage().split()))

    def _all_reduce(self, own: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in tf.nest.flatten(values) if value is not None]
        self._recorder.note("all_reduce", values=len(tensors))
        floating = [each for each in tensors if tf.convert_to_tensor(each).dtype.is_floating]
        with self._recorder.before(floating, functools.partial(self._recorder.reduced, user_line())):
            return own(values, *args, **kwargs)


def _wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    own = getattr(owner, name)

    @functools.wraps(own)
    @_as_it_is
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(own, *args, **kwargs)

    setattr(owner, name, wrapped)


def noisy_layers(keras: Any) -> list[Any]:
    """Return the classes of layers that draw random numbers in training."""
    names = [name for name in dir(keras.layers) if name in _NOISY or name.startswith("Random")]
    return [getattr(keras.layers, name) for name in names]


def quiet(call: Callable[..., Any], tell: Callable[[Any], None] = lambda layer: None) -> Callable[..., Any]:
    """Return the ``call`` of a layer as it is outside training; ``tell`` is called with a layer that would train."""

    @functools.wraps(call)
    @_as_it_is
    def called(layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(layer, "synchronized", False):
            return call(layer, inputs, *args, **kwargs)
        tell(layer)
        kwargs["training"] = False
        return call(layer, inputs, **kwargs)

    return called


def _with(**fixed: Any) -> Callable[..., Any]:
    """Return a hook that fixes some arguments."""
    return lambda own, *args, **kwargs: own(*args, **{**kwargs, **fixed})


def _states(models: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
    """Return the variables of models that steps can change, but that no optimizer trains."""
    known = {id(variable) for variable in trained}
    found = [weight for model in models for weight in model.weights if not weight.trainable]
    found += [variable for model in models for variable in training_state.loose_variables(model)]
    return [each for each in found if id(each) not in known and tf.as_dtype(each.dtype).is_floating]


def _identity(value: Any) -> Any:
    return tf.identity(value) if isinstance(value, tf.Tensor) else value


def changed(value: Any, by: float = _LAST_BIT, seed: int = 0) -> Any:
    """Return a tensor of floats, each changed by a part of itself up or down; anything else as it is."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    signs = tf.random.stateless_uniform(tf.shape(value), [3, 5 + seed], dtype=tf.float32) - 0.5
    return value * tf.cast(1 + by * tf.sign(signs), value.dtype)


def _leading_to(gradients: Sequence[Any]) -> Iterator[Any]:
    """Yield the operations of a graph on which gradients depend."""
    waiting = [part.op for part in tf.nest.flatten(gradients, expand_composites=True) if part is not None]
    seen: set[Any] = set()
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
            yield operation


def _line_of(operation: Any) -> str:
    """Return the innermost line of the script that has made an operation of a graph."""
    frames = [frame for frame in operation.traceback if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
