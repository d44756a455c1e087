"""Records the steps of one process of ``npurun verify``, which wraps Keras and TensorFlow as soon as the script has
imported them: of a tensor a few fixed random projections, of a batch a digest of each row.

Optimizers are wrapped for the gradients that enter them after any reduction; models for the rows of their batches;
callbacks for the logs. ``script_calls.py`` wraps other calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import job
from npu_device._src.comparison import noise, topics
from npu_device._src.comparison.compare import Record, RecordedStep
from npu_device._src.gradients.reduction import compared_with_one_process
from npu_device._src.training.fit.graph_lines import where
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.digests import variable_name
from npu_device._src.verify.phases import Phases, acting_between_epochs
from npu_device._src.verify.plan import PlannedProcess
from npu_device._src.verify.projections import digests_of, projected
from npu_device._src.verify.script_calls import ScriptCalls
from npu_device._src.verify.wrapping import after, fixing, of_samples, wrap
from npu_device._src.world.current_step import current_step

_SCOPE = "npu_verify"  # name scope of the operations that record
_LARGE_CHANGE = 0.125  # relative change of inputs where ranks are only compared with each other


class StepRecorder:
    """The record of this process, and the hooks that fill it. TensorFlow's are installed at once.

    A hook is called instead of what it wraps, which is its first argument, ``original``.

    What belongs to a step comes one after the other. The call of a model adds rows to ``_next_step``, and other calls
    are kept in ``_script_calls``. When the optimizer is called, or traced, these become the calls before its steps.
    When it makes a step, that is ``_next_step``. Then come its logs.
    """

    def __init__(self, process: PlannedProcess) -> None:
        self._process = process
        self._record = Record()
        self._next_step = RecordedStep()
        self._lock = threading.RLock()
        self._phases = Phases(process, self._record, self._lock)
        self._script_calls = ScriptCalls(process, self._record, self._lock)
        self._optimizer_names = weakref.WeakKeyDictionary[Any, str]()
        self._models: list = []
        self._states: dict[str, list] = {}  # untrained variables, by the optimizer's name
        self._logs: dict[str, float] = {}  # of the latest step, recorded or not
        atexit.register(self._save)
        # Numbers must be those of one process, so that this package neither compresses gradients nor shards optimizers.
        compared_with_one_process.set()
        wrap(tf.GradientTape, "gradient", self._tape_gradient)
        wrap(tf.compat.v1.train.Optimizer, "apply_gradients", self._apply)
        # Taken from the class that defines it, for all sessions.
        session_classes = tf.compat.v1.Session.__mro__
        session = next(base for base in session_classes if "run" in vars(base))
        wrap(session, "run", self._run_session)

    def install(self, module: Any) -> None:
        """Wrap the classes of a Keras package, or the calls of this package."""
        if module.__name__ == "npu_device.distribute":
            self._script_calls.wrap_distribute(module)
        elif module is not tf:
            self._wrap_keras(module)
            self._script_calls.wrap_keras(module)

    def _wrap_keras(self, keras: Any) -> None:
        for owner, name in compat.gradient_methods(keras):
            wrap(owner, name, self._apply)
        for owner, name in compat.loss_scale_methods(keras):
            # The loss scale begins at 1, since a large one overflows in other steps on each rank.
            wrap(owner, name, fixing(initial_scale=1.0))
        model = keras.Model
        wrap(model, "__call__", of_samples(self._call_model))
        wrap(model, "fit", functools.partial(self._fit, keras))
        for name in ("evaluate", "predict"):
            wrap(model, name, functools.partial(self._evaluate, name))
        # Taken from the class that defines it, since Keras compares the two when it loads a model.
        compiled = next(base for base in model.__mro__ if "compile" in vars(base))
        # XLA is off, since it can't call Python.
        wrap(compiled, "compile", fixing(jit_compile=False))
        callbacks = keras.callbacks.CallbackList
        wrap(callbacks, "on_train_batch_end", self._batch_ended)
        wrap(callbacks, "on_epoch_end", after(self._phases.end_epoch))

    def _keep_before(self, tensors: Sequence, keep: Callable[..., None]) -> Any:
        """Call a function with the arrays of tensors, now or when the graph runs; None stands for no gradient.

        Return a context: in a graph, the operations that are made in it wait for the call.
        """

        def keep_locked(*arrays: Any) -> np.bool_:
            with self._lock:
                keep(*arrays)
            return np.bool_(True)

        with tf.name_scope(_SCOPE):
            dense = []
            for tensor in tensors:
                if tensor is None:
                    dense.append(tf.constant(np.nan))
                else:
                    dense.append(tf.convert_to_tensor(tensor))
            if tf.executing_eagerly():
                keep_locked(*(tensor.numpy() for tensor in dense))
                return contextlib.nullcontext()
            recorded = tf.numpy_function(keep_locked, dense, tf.bool)
        return tf.control_dependencies([recorded])

    # Optimizers

    def _apply(
        self, original: Any, optimizer: Any, gradients: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record gradients and weights before an update."""
        gradients = list(gradients)
        pairs = gradients
        if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
            variables = next(iter(args), kwargs.get("trainable_variables"))
            pairs = compat.gradients_and_variables(optimizer, gradients, variables)
        with_variables = [pair for pair in pairs if pair[1] is not None]
        applied, trained = zip(*with_variables)
        self._note_random_operations(applied)
        name = self._name_of_optimizer(optimizer)
        # Found in the first step, since a step is only the successor of another with the same names.
        states = self._states.setdefault(name, _states(self._models, trained))
        weights = [*trained, *states]
        names = list(map(variable_name, weights))
        keep = functools.partial(self._keep_step, name, names, len(trained))
        after_record = self._keep_before([*applied, *weights], keep)
        if tf.inside_function():
            # No block is needed in a function: it reads variables before it changes them, and an optimizer may make
            # some there.
            after_record = contextlib.nullcontext()
        with after_record:
            return original(optimizer, gradients, *args, **kwargs)

    def _note_random_operations(self, gradients: Sequence) -> None:
        """Note the operations that draw random numbers for gradients of a graph."""
        if tf.executing_eagerly():
            return
        tensors = tf.nest.flatten(gradients, expand_composites=True)
        targets = [tensor.op for tensor in tensors if tensor is not None]
        for operation in compat.walk(targets, compat.producers):
            if "Random" in operation.type and _SCOPE not in operation.name:
                self._script_calls.note(topics.RANDOM, where(operation), operation.type)

    def _name_of_optimizer(self, optimizer: Any) -> str:
        """Return the name of an optimizer that makes or traces a step, and keep the calls that led to it."""
        # Optimizers are known by object, since their names repeat. They are numbered by their first step, whose order
        # is the same in all processes.
        with self._lock:
            count = len(self._record.calls_before)
            name = self._optimizer_names.setdefault(optimizer, f"optimizer {count}")
            calls = self._record.calls_before.setdefault(name, [])
            calls += [call for call in self._script_calls.pop() if call not in calls]
            self._phases.entered(name, type(optimizer).__name__)
            return name

    def _keep_step(
        self, optimizer: str, names: Sequence[str], trained: int, *arrays: np.ndarray
    ) -> None:
        """Keep a step of an optimizer, before it: gradients, and values of the variables, the trained ones first."""
        step = self._next_step
        self._next_step = RecordedStep()
        self._logs = step.logs
        if self._phases.takes(step, optimizer):
            self._record.joined = job.current() is not None
            step.names = names
            step.gradients = projected(arrays[:trained])
            step.weights = projected(arrays[trained:])
            self._record.steps.append(step)
            # Saved at each step, since the process may be killed after any.
            self._save()

    def _save(self) -> None:
        with self._lock:
            self._record.save(self._process.folder)

    def _tape_gradient(self, original: Any, tape: Any, *args: Any, **kwargs: Any) -> Any:
        """With Horovod's names, keep what tapes give: the ranks are compared with the average of it."""
        gradients = original(tape, *args, **kwargs)
        if self._by_horovod():
            self._keep_before(tf.nest.flatten(gradients), self._keep_tape_gradients)
        return gradients

    def _keep_tape_gradients(self, *arrays: np.ndarray) -> None:
        """Keep gradients that a tape has given."""
        sums = self._next_step.tape_gradients
        count = len(arrays)
        sums[count] = sums.get(count, 0) + projected(arrays)

    def _by_horovod(self) -> bool:
        """Note and return whether the script has called Horovod's ``init``."""
        face = sys.modules.get("npu_device._src.horovod.process")
        self._record.uses_horovod |= bool(face and face.is_initialized())
        return self._record.uses_horovod

    # Models

    def _call_model(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if not any(known_model is model for known_model in self._models):
            self._models.append(model)
        inputs = next(iter([*args, *kwargs.values()]), None)
        tensors = list(_tensors(inputs))
        rows = np.int32(-1)
        if compat.are_recorded(tensors):
            # What another model has made isn't a sample.
            rows = np.int32(0)
        elif step is not None:
            # Only ``fit`` tells how many of the rows count.
            rows = step.share.rows * tf.cast(step.share.sum_factor, tf.int32)
        with self._keep_before([rows, *tensors], self._keep_rows):
            if args and not tf.executing_eagerly():
                # The model takes copies that are made after the count: an operation whose result nobody takes could
                # run at any time, and count the rows in the next step.
                args = _with_first(args, _identity)
        change_by = self._change_of(model)
        change = functools.partial(noise.changed, by=change_by, seed=self._process.rank)
        if change_by and args:
            args = _with_first(args, change)
        outputs = original(model, *args, **kwargs)
        if change_by:
            # Inputs may be whole numbers, which don't change.
            outputs = tf.nest.map_structure(change, outputs)
        return outputs

    def _change_of(self, model: Any) -> float:
        """Return by which fraction the inputs of a model are changed in this process."""
        last_bit = noise.last_bit(model.compute_dtype)
        self._record.last_bit = max(self._record.last_bit, last_bit)
        # With Horovod's names, each rank has to have gradients of its own.
        if self._by_horovod():
            return _LARGE_CHANGE
        if self._process.is_perturbed:
            return last_bit
        return 0.0

    def _keep_rows(self, count: np.ndarray, *arrays: np.ndarray) -> None:
        """Count the rows of a batch as samples of the next step."""
        self._next_step.rows.update(digests_of(count, *arrays))

    def _batch_ended(self, original: Any, callbacks: Any, batch: Any, logs: Any = None) -> Any:
        logs = logs or {}
        numbers = {name: float(logs[name]) for name in logs if np.ndim(logs[name]) == 0}
        self._keep_logs(numbers)
        # Metrics with a number per class stay as they are.
        returned = original(callbacks, batch, {**logs, **numbers})
        model = self._phases.end_fit()
        if model is not None:
            names = {metric.name for metric in training_state.metrics(model)}
            # Keras adds a metric for the loss, which isn't the loss that a step of the script's own returns.
            self._record.metrics |= names - {"loss"}
        return returned

    def _keep_logs(self, logs: dict[str, float]) -> None:
        """Keep numbers that the script sees of the latest step."""
        with self._lock:
            self._logs.update(logs)

    def _fit(self, keras: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        if arguments.get("validation_data") is not None or arguments.get("validation_split"):
            self._script_calls.note(topics.EVALUATION, detail="the validation in fit")
        names = acting_between_epochs(keras.callbacks, arguments.get("callbacks"))

        def note_cut() -> None:
            if names:
                self._script_calls.note(topics.EPOCH_END, detail=", ".join(names))

        # Shuffling is off, since ranks and one process have to read the same order.
        kwargs["shuffle"] = False
        return self._phases.fit(original, note_cut, *args, **kwargs)

    def _evaluate(self, call: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        # The validation of ``fit`` calls this, too, and has been noted by its line.
        self._script_calls.note(topics.EVALUATION, detail=call)
        self._phases.note_place()
        return original(*args, **kwargs)

    def _run_session(
        self, original: Any, session: Any, fetches: Any, *args: Any, **kwargs: Any
    ) -> Any:
        logs = self._logs
        fetched = original(session, fetches, *args, **kwargs)
        # A call that made no step has no logs of one.
        if self._logs is not logs:
            arrays = fetched
            # The keys of the dictionary may be hooks.
            if isinstance(fetched, dict):
                arrays = list(fetched.values())
            leaves = tf.nest.flatten(arrays)
            numbers = [float(leaf) for leaf in leaves if isinstance(leaf, np.floating)]
            self._keep_logs(
                {f"fetched number {position}": number for position, number in enumerate(numbers)}
            )
        return fetched


def _states(models: Sequence, trained: Sequence) -> list:
    """Return the variables of models that steps can change, but that no optimizer trains."""
    trained_ids = {id(variable) for variable in trained}
    variables = []
    for model in models:
        weights = training_state.weights(model)
        variables += [weight for weight in weights if not weight.trainable]
        variables += training_state.loose_variables(model)
    return [
        variable
        for variable in variables
        if id(variable) not in trained_ids and tf.as_dtype(variable.dtype).is_floating
    ]


def _tensors(inputs: Any) -> Iterator:
    """Yield the inputs of a model that are tensors or arrays, as dense tensors."""
    for leaf in tf.nest.flatten(inputs):
        if isinstance(leaf, tf.RaggedTensor):
            yield leaf.to_tensor()
        elif isinstance(leaf, (tf.Tensor, np.ndarray)):
            yield tf.convert_to_tensor(leaf)


def _with_first(arguments: tuple, change: Callable) -> tuple:
    """Return arguments, of which each tensor of the first one is changed."""
    first, *others = arguments
    return (tf.nest.map_structure(change, first), *others)


def _identity(leaf: Any) -> Any:
    if not tf.is_tensor(leaf):
        return leaf
    return tf.identity(leaf)
