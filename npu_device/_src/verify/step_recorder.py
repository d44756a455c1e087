"""Records the steps of one process of ``npurun verify``, which wraps Keras and TensorFlow as soon as the script has
imported them: of a tensor a few fixed random projections, of a batch a digest of each row.

Optimizers are wrapped for the gradients that enter them after any reduction; models for the rows of their batches;
callbacks for the logs; other calls since their line explains a difference. Noise is taken out: dropout, noise and
augmentation layers pass their inputs on, shuffling keeps the order, and batch normalisation that isn't synchronized
uses its moving statistics.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import job
from npu_device._src.collectives.call import user_line
from npu_device._src.comparison import noise
from npu_device._src.comparison.compare import PROJECTIONS, Record, RecordedCall, RecordedStep, load
from npu_device._src.gradients.reduction import send_uncompressed
from npu_device._src.trace.trace import leading_to
from npu_device._src.training.distribute.normalization import is_alone
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.optimizers.accumulation import reduce_in_each_step
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.digests import checksum, variable_name
from npu_device._src.verify.phases import Phases
from npu_device._src.verify.plan import Process
from npu_device._src.world.current_step import current_step

_SCOPE = "npu_verify"  # the name scope of the operations that record
_WIDTH = 1024  # of the matrix that a tensor is for its projections
_DRAWS = ("normal", "uniform", "truncated_normal", "categorical", "shuffle")
_ADAPTED = ("mean", "variance", "bin_boundaries")
_MUCH = 0.125  # by which inputs of ranks differ where nothing is compared with one process


class Recorder:
    """The record of this process, and its hooks. TensorFlow's are installed at once, and it is seeded."""

    def __init__(self, process: Process, seed: int) -> None:
        self._process, self._record, self._next = process, Record(), RecordedStep()
        self._lock = threading.RLock()
        self._phases = Phases(process, self._record, self._lock)
        self._calls: list[RecordedCall] = []  # since the last step that was made or traced
        self._names: weakref.WeakKeyDictionary[Any, str] = (
            weakref.WeakKeyDictionary()
        )  # of optimizers
        self._models: list[Any] = []
        self._states: dict[str, list[Any]] = {}
        self._unseeded: weakref.WeakKeyDictionary[Any, str] = (
            weakref.WeakKeyDictionary()
        )  # datasets, and the line
        self._inside = 0  # depth of models that call models
        self._known_optimizers = 0
        self._is_recorded = False  # the latest step is
        atexit.register(self._record.save, process.folder)
        send_uncompressed()  # compression rounds
        reduce_in_each_step()
        tf.random.set_seed(seed)
        tf.compat.v1.get_default_graph().seed = self._seed = seed
        session = next(kind for kind in tf.compat.v1.Session.__mro__ if "run" in vars(kind))
        _wrap(
            (tf.data.Dataset, "shuffle", self._shuffle),
            (tf.GradientTape, "gradient", self._gradient),
            (tf.Graph, "__init__", self._seed_graph),
            (session, "run", self._run),
            (tf.compat.v1.train.Optimizer, "apply_gradients", self._apply),
            *((tf.random, name, functools.partial(self._drawn, name)) for name in _DRAWS),
            (tf.random, "set_seed", functools.partial(self._noted, "seed")),
            (tf.compat.v1, "set_random_seed", functools.partial(self._noted, "seed")),
            (tf.nn, "compute_average_loss", functools.partial(self._noted, "compute_average_loss")),
            (tf, "clip_by_global_norm", functools.partial(self._noted, "clip")),
            (tf, "clip_by_norm", functools.partial(self._noted, "clip")),
        )

    def install(self, module: Any) -> None:
        """Wrap the classes of a Keras package, or the calls of this package."""
        if module.__name__ == "npu_device.distribute":
            _wrap(
                (module, "all_reduce", self._all_reduce),
                (module, "shard_and_rebatch_dataset", self._divide),
            )
        elif module is not tf:
            self._install_keras(module)

    def _install_keras(self, keras: Any) -> None:
        kinds = [
            kind
            for _, kind in inspect.getmembers(keras.layers, inspect.isclass)
            if "adapt" in vars(kind)
        ]
        # The class that defines it: Keras compares the two when it loads a model.
        compiled = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
        _wrap(
            *((*entry, self._apply) for entry in compat.gradient_entries(keras)),
            # A large scale overflows in other steps on each rank.
            *((*entry, _with(initial_scale=1.0)) for entry in compat.loss_scale_entries(keras)),
            (keras.Model, "__call__", self._call_model),
            (keras.Model, "fit", self._fit),
            (compiled, "compile", _with(jit_compile=False)),  # XLA can't call Python
            (keras.callbacks.CallbackList, "on_train_batch_end", self._batch_ended),
            (keras.layers.Layer, "add_loss", self._add_loss),
            (keras.utils, "set_random_seed", functools.partial(self._noted, "seed")),
            *((kind, "adapt", self._adapt) for kind in kinds),
        )
        for layer in noise.noisy_layers(keras):
            layer.call = noise.quiet(layer.call)
        batch_norm = keras.layers.BatchNormalization
        batch_norm.call = noise.quiet(
            batch_norm.call, lambda layer: self._note("batch_norm", what=layer.name)
        )
        _wrap((batch_norm, "call", self._normalize))

    def _normalize(self, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a layer that trains by the samples of one rank, despite ``synchronized=True``."""
        arguments = inspect.signature(own).bind(layer, *args, **kwargs).arguments
        if job.current() is not None and arguments.get("training") and is_alone(layer):
            self._note("normalizes alone", what=layer.name)
        return own(layer, *args, **kwargs)

    def _note(self, kind: str, line: str = "", what: str = "", outcome: Any = None) -> None:
        """Keep a call of the script with its line, once."""
        call = RecordedCall(kind, line or user_line(), what, outcome)
        with self._lock:
            for calls in (self._record.calls, self._calls):
                if call not in calls:
                    calls.append(call)

    def _before(self, tensors: Sequence[Any], keep: Callable[..., None]) -> Any:
        """Call a function with the arrays of tensors, now or when the graph runs; None stands for no gradient. Return
        the context of what is to happen after that.
        """

        def call(*arrays: Any) -> np.bool_:
            with self._lock:
                keep(*arrays)
            return np.bool_(True)

        with tf.name_scope(_SCOPE):
            dense = [
                tf.constant(np.nan) if each is None else tf.convert_to_tensor(each)
                for each in tensors
            ]
            if tf.executing_eagerly():
                call(*(tensor.numpy() for tensor in dense))
                return contextlib.nullcontext()
            done = tf.numpy_function(call, dense, tf.bool)
        return tf.control_dependencies([done])

    # Optimizers

    def _apply(self, own: Any, optimizer: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Record gradients and weights before an update."""
        gradients = list(gradients)
        variables = args[0] if args else kwargs.get("trainable_variables")
        of_sessions = isinstance(optimizer, tf.compat.v1.train.Optimizer)
        pairs = (
            gradients
            if of_sessions
            else compat.gradients_and_variables(optimizer, gradients, variables)
        )
        entered, trained = zip(*[pair for pair in pairs if pair[1] is not None])
        parts = [
            part for part in tf.nest.flatten(entered, expand_composites=True) if part is not None
        ]
        for operation in [] if tf.executing_eagerly() else leading_to([part.op for part in parts]):
            if "Random" in operation.type and _SCOPE not in operation.name:
                self._note("random", where(operation), operation.type)
        name = self._name(optimizer)
        weights = [*trained, *self._states.setdefault(name, _states(self._models, trained))]
        keep = functools.partial(self._step, name, list(map(variable_name, weights)), len(trained))
        after = self._before([*entered, *weights], keep)
        # A function reads variables before it changes them, and an optimizer may make some there.
        with contextlib.nullcontext() if tf.inside_function() else after:
            return own(optimizer, gradients, *args, **kwargs)

    def _name(self, optimizer: Any) -> str:
        """Return the name of an optimizer that makes or traces a step, and keep the calls that led to it."""
        with self._lock:
            if optimizer not in self._names:
                self._names[optimizer] = f"optimizer {self._known_optimizers}"
                self._known_optimizers += 1
            name = self._names[optimizer]
            calls = self._record.calls_before.setdefault(name, [])
            calls += [call for call in self._calls if call not in calls]
            self._calls.clear()
            self._phases.entered(name, type(optimizer).__name__)
            return name

    def _step(
        self, optimizer: str, names: Sequence[str], trained: int, *arrays: np.ndarray
    ) -> None:
        """Keep a step of an optimizer, before it: gradients, and values of the variables, the trained ones first."""
        phase = self._phases.step(optimizer)
        if phase is not None:
            self._record.joined = job.current() is not None
            gradients, weights = _projected(arrays[:trained]), _projected(arrays[trained:])
            self._record.steps.append(
                replace(self._next, **phase, names=names, gradients=gradients, weights=weights)
            )
            self._record.save(self._process.folder)
        self._is_recorded = phase is not None
        self._next = RecordedStep()

    def _gradient(self, own: Any, tape: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(tape, *args, **kwargs)
        if self._by_horovod():
            self._before(tf.nest.flatten(found), self._keep_own)
        return found

    def _keep_own(self, *arrays: np.ndarray) -> None:
        """Keep gradients that a tape has given."""
        known = self._next.own
        known[len(arrays)] = known.get(len(arrays), 0) + _projected(arrays)

    def _by_horovod(self) -> bool:
        """Return True if the script has called Horovod's ``init``."""
        face = sys.modules.get("npu_device._src.horovod.process")
        self._record.horovod |= bool(face and face.is_initialized())
        return self._record.horovod

    # Models

    def _call_model(self, own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        is_rehearsal = step is not None and step.is_rehearsal
        if self._inside or is_rehearsal or not compat.a_tape_records():
            return own(model, *args, **kwargs)
        if not any(each is model for each in self._models):
            self._models.append(model)
        process, record = self._process, self._record
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        leaves = [
            each.to_tensor() if isinstance(each, tf.RaggedTensor) else each
            for each in tf.nest.flatten(inputs)
        ]
        tensors = [
            tf.convert_to_tensor(each)
            for each in leaves
            if isinstance(each, (tf.Tensor, np.ndarray))
        ]
        # What another model has made isn't a sample. Only fit says how many of the rows count.
        rows = step.share.rows * tf.cast(step.share.counts, tf.int32) if step else np.int32(-1)
        rows = np.int32(0) if compat.are_recorded(tensors) else rows
        with self._before(
            [rows, *tensors], lambda *arrays: self._next.rows.update(_digests(*arrays))
        ):
            if (
                args and not tf.executing_eagerly()
            ):  # else a function may count the rows in the next step
                same = tf.nest.map_structure(
                    lambda each: tf.identity(each) if tf.is_tensor(each) else each, args[0]
                )
                args = (same, *args[1:])
        last_bit = noise.last_bit(model.compute_dtype)
        record.last_bit = max(record.last_bit, last_bit)
        # By Horovod's names each rank has to have gradients of its own.
        by = _MUCH if self._by_horovod() else last_bit * process.perturbed
        change = functools.partial(noise.changed, by=by, seed=process.rank)
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
            self._note("add_loss")
        return own(layer, loss, *args, **kwargs)

    def _batch_ended(self, own: Any, callbacks: Any, batch: Any, logs: Any = None) -> Any:
        logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self._keep_logs(logs)
        result = own(callbacks, batch, logs)
        model = self._phases.end_fit()
        if model is not None:  # whose loss isn't its tracker's, if its step returns another
            self._record.metrics.update(
                metric.name for metric in compat.metrics_of(model) if metric.name != "loss"
            )
        return result

    def _keep_logs(self, logs: dict[str, float]) -> None:
        """Keep numbers that the script sees of the latest step."""
        with self._lock:
            if self._is_recorded:
                self._record.steps[-1].logs.update(logs)

    def _fit(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._phases.fit(original, *args, **{**kwargs, "shuffle": False})

    def _adapt(self, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(layer, *args, **kwargs)
        state: Any = [np.array(getattr(layer, name, None)).tolist() for name in _ADAPTED]
        if hasattr(layer, "get_vocabulary"):
            state = layer.get_vocabulary()
        self._note("adapted", what=repr(layer.name), outcome=zlib.crc32(repr(state).encode()))
        return result

    def _run(self, own: Any, session: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        steps = len(self._record.steps)
        result = own(session, fetches, *args, **kwargs)
        if len(self._record.steps) > steps:
            values = (
                list(result.values()) if isinstance(result, dict) else result
            )  # its keys may be hooks
            numbers = [
                float(each) for each in tf.nest.flatten(values) if isinstance(each, np.floating)
            ]
            self._keep_logs(
                {f"fetched number {place}": number for place, number in enumerate(numbers)}
            )
        return result

    # Data and randomness

    def _seed_graph(self, own: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        own(graph, *args, **kwargs)
        if type(graph) is tf.Graph:
            graph.seed = self._seed

    def _shuffle(
        self, own: Any, dataset: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        process, record = self._process, self._record
        number = len(record.of("shuffle"))
        call = RecordedCall("shuffle", user_line(), outcome=None if seed is None else int(seed))
        record.calls.append(call)
        if (
            seed is not None
            and process.ranks > 1
            and load(process.single.folder).of("shuffle")[number:][:1] != [call]
        ):
            return own(
                dataset, buffer_size, seed, *args, **kwargs
            )  # another seed than that of the single process
        if seed is None and not record.of("seed"):
            dataset = dataset.take(-1)
            self._unseeded[dataset] = call.line
        return dataset

    def _divide(self, own: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        for part in compat.datasets_of(dataset):
            if part in self._unseeded:
                self._note("unseeded", self._unseeded[part], "without a seed")
        return own(dataset, *args, **kwargs)

    def _drawn(self, name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and compat.a_tape_records():
            self._note("random", what=f"tf.random.{name}")
        return own(*args, **kwargs)

    def _noted(self, kind: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(kind)
        return own(*args, **kwargs)

    def _all_reduce(self, own: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(
            "all_reduce", outcome=sum(value is not None for value in tf.nest.flatten(values))
        )
        return own(values, *args, **kwargs)


def _wrap(*hooks: tuple[Any, str, Callable[..., Any]]) -> None:
    """Let hooks be called instead of attributes of modules and classes, with these as their first argument."""
    for owner, name, hook in hooks:
        setattr(owner, name, _wrapped(getattr(owner, name), hook))


def _wrapped(own: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    @tf.autograph.experimental.do_not_convert
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(own, *args, **kwargs)

    return wrapped


def _with(**fixed: Any) -> Callable[..., Any]:
    """Return a hook that fixes some arguments."""
    return lambda own, *args, **kwargs: own(*args, **{**kwargs, **fixed})


def _states(models: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
    """Return the variables of models that steps can change, but that no optimizer trains."""
    known = {id(variable) for variable in trained}
    weights = [
        weight for model in models for weight in model.weights if not compat.is_vocabulary(weight)
    ]
    found = [weight for weight in weights if not weight.trainable]
    found += [variable for model in models for variable in training_state.loose_variables(model)]
    return [each for each in found if id(each) not in known and tf.as_dtype(each.dtype).is_floating]


def _projected(arrays: Sequence[Any]) -> np.ndarray:
    """Return the projections of each array; NaN for one that is NaN."""
    found = [
        _projection(np.asarray(array, np.float64).ravel(), place)
        for place, array in enumerate(arrays)
    ]
    return np.array(found).reshape(-1, PROJECTIONS)


def _projection(flat: np.ndarray, place: int) -> np.ndarray:
    numbers = np.random.default_rng([place, flat.size])
    width = min(flat.size, _WIDTH) or 1
    whole = np.pad(flat, (0, -flat.size % width)).reshape(-1, width)
    left, right = (
        numbers.standard_normal((PROJECTIONS, len(whole))),
        numbers.standard_normal((PROJECTIONS, width)),
    )
    return np.asarray(((left @ whole) * right).sum(axis=1))


def _digests(count: np.ndarray, *leaves: np.ndarray) -> list[int]:
    """Return a number for each row of the arrays that have as many rows as the first."""
    arrays = [leaf for leaf in leaves if leaf.ndim]
    found = [0] * (len(arrays[0]) if arrays else 0)
    for array in arrays:
        for place, row in enumerate(array if len(array) == len(found) else ()):
            found[place] = checksum(np.array(row, array.dtype), found[place])
    return found[: None if count < 0 else int(count)]
