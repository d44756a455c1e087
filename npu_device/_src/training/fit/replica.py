"""``npu.distribute.replicate``, the one line for Keras. It replaces methods of a model and its parts, and of no class;
``watching.optimizer_hook`` wraps the methods of optimizer classes, while a job is open.

For good, on the model (``Replica._methods`` has the reasons): ``make_train_function``, ``make_test_function``,
``make_predict_function``, ``train_step``, ``test_step``, ``predict_step``, ``fit``, ``evaluate``, ``predict``,
``save``, ``save_weights``, ``export``, and tf-keras's ``_maybe_load_initial_counters_from_ckpt``. On models inside it
the three that write files. On ranks but 0 ``save_own_variables`` and ``_trackable_children``, which functions that
save a model call: a warning says that each rank writes (``files``).

For good, at each ``fit`` on each optimizer that a step can reach (``Function.make``; ``weighting``,
``reducing_methods``):

- ``apply_gradients``, ``apply``, ``aggregate_gradients``, ``_aggregate_gradients``: they reduce gradients first
- ``_all_reduce_sum_gradients`` of Keras 3: no sum over replicas, which TensorFlow would keep for good
- ``scale_loss``, ``minimize``: in Keras's own step, the loss is weighted by the samples of the rank, which costs less

While a step runs (``replaced.Replaced`` gives everything back):

- ``call`` of losses, and ``compute_loss`` of a Keras 3 model: another denominator than the number of samples is that of
  all ranks (``losses``)
- ``add_loss`` of the script's layers, ``activity_regularizer`` of layers whose Keras adds it up: sums over samples
- ``update_state`` of metrics: a number counts by the samples of the rank; a metric of the script gets all samples
- ``result`` and ``reset_state`` of metrics: the logs show the results of all ranks; a reset in a step is refused
- ``_moments``, ``_sync_calculate_mean_and_var`` of synchronized batch normalization: of all ranks
- ``next`` and ``skip`` of random generators: each rank draws its own numbers (``randomness``)
- ``call`` of a model with ``jit_compile``: XLA compiles it instead of the step (``xla``)
- in the first-step check ``call`` of Keras's layers that are noisy, and what applies gradients (``dry_step``)
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training.distribute.variables import require_no_strategy
from npu_device._src.training.fit import files, shared_data, start
from npu_device._src.training.fit.divided import (
    OwnData,
    Pipeline,
    sequence_of_rank,
    with_equal_length,
)
from npu_device._src.training.fit.function import Function, ReplicaState
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.fit.sources import modes_that_differ
from npu_device._src.training.fit.step import predict_step, train_or_test_step
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.partial_sums import settle
from npu_device._src.training.watching.same_variables import warn_if_different
from npu_device._src.world.world import World

_REPLICA = "_npu_replica"
_log = logging.getLogger("npu_device")


class Replica(ReplicaState):
    """One model on this rank. Keras calls its functions (``function``), in which Keras calls its steps (``step``)."""

    def __init__(self, world: World, model: Any, shard_optimizer: bool | None = None) -> None:
        super().__init__(world, model, shard_optimizer)
        self.train = Function(self, "train")
        self.test = Function(self, "test")
        self.predict = Function(self, "predict")
        attributes = {**self._methods(), _REPLICA: self}
        # An error gives everything back: a model that is replicated in part would train alone.
        with Replaced() as replaced:
            for name, method in attributes.items():
                replaced.set(model, name, method)
            files.save_parts_once(world, model, replaced)
            replaced.pop_all()

    def _methods(self) -> dict[str, Any]:
        """Return all that is replaced on the model for good, and why. A step replaces more while it runs."""
        model = self.model
        methods: dict[str, Any] = {
            # Keras makes a function once, and calls it with every batch. Ours makes the ranks ready before the first.
            "make_train_function": self.train.make,
            "make_test_function": self.test.make,
            "make_predict_function": self.predict.make,
            # A step works on this rank's share of the batch, and gives the results of all ranks.
            "train_step": train_or_test_step(self.train),
            "test_step": train_or_test_step(self.test),
            "predict_step": predict_step(self.predict),
            # A call has the data and the callbacks of one process. Only rank 0 prints, and runs callbacks that write.
            "fit": self._fit(model.fit),
            "evaluate": self._evaluate_or_predict(self.test, model.evaluate),
            "predict": self._evaluate_or_predict(self.predict, model.predict),
        }
        for name in files.METHODS:
            # The saving methods write a file once for the whole job. A script may have a setting of such a name.
            if callable(getattr(model, name, None)):
                methods[name] = files.saving(self.world, getattr(model, name))
        counters = getattr(model, compat.COUNTERS_METHOD, None)
        # In tf-keras, ``fit`` begins with the epoch of rank 0's backup.
        if counters is not None:
            methods[compat.COUNTERS_METHOD] = lambda *args: self.world.object_from_root(
                counters(*args)
            )
        return methods

    def _fit(self, own_fit: Callable) -> Callable:
        def fit(*args: Any, **kwargs: Any) -> Any:
            arguments = self._prepared(self.train, own_fit, args, kwargs)
            shared_data.split_validation(arguments)
            # Keras calls ``evaluate`` itself, with other objects than the user has passed.
            self.test.source = arguments.get("validation_data")
            self._replace_own_data(arguments, "validation_data")
            are_shared = shared_data.pass_as_tensors(self.world, self.model, arguments)
            passed = arguments.get("callbacks")
            callbacks = callbacks_of_rank(self.world, self.model, passed, self._compare_batches)
            arguments.set("callbacks", callbacks)
            # The statement at the start gets the number of steps from them.
            self.callbacks = callbacks
            # The state is set before Keras draws the order in which it shuffles.
            start.set_random_state_from_root(self.world)
            if are_shared:
                shared_data.pass_as_batches(self.world, self.model, arguments)
            self.train.is_first_call = True
            self.test.is_first_call = True
            # A callback may call ``fit`` itself.
            was_in_fit = self.in_fit
            self.in_fit = True
            try:
                with silent(self.world, callbacks):
                    history = arguments.call()
            finally:
                self.in_fit = was_in_fit
                # Dropped, so that the data can be freed before the model.
                self.train.source = None
                self.test.source = None
            # Keras hasn't called the train function, since no epoch was left to train.
            if self.train.is_first_call:
                start.build_optimizer_as_elsewhere(self.world, self.model)
                start.set_variables_from_root(self.world, self.model, training=True)
            variables = training_state.common(self.model, training_state.weights(self.model))
            variables += training_state.loose_variables(self.model)
            # The comparison waits for rank 0, and so for the files that rank 0 writes.
            warn_if_different(self.world, variables)
            return history

        return fit

    def _evaluate_or_predict(self, function: Function, own_method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Keras calls it for the validation data of a ``fit``, which has prepared all arguments.
            if compat.FOR_VALIDATION in kwargs:
                arguments = Arguments(self.model, own_method, args, kwargs)
                if not self.world.is_main:
                    arguments.set("verbose", 0)
                return arguments.call()
            source_of_fit = function.source
            arguments = self._prepared(function, own_method, args, kwargs)
            passed = arguments.get("callbacks")
            if passed is not None:
                arguments.set("callbacks", without_writing(self.world, passed))
            if self.in_fit:
                return self._call_in_fit(function, arguments, source_of_fit)
            shared_data.pass_as_tensors(self.world, self.model, arguments)
            function.is_first_call = True
            try:
                returned = arguments.call()
            finally:
                function.source = None
            self._compare_batches()
            return returned

        return call

    def _call_in_fit(self, function: Function, arguments: Arguments, source_of_fit: Any) -> Any:
        """Call ``evaluate`` or ``predict`` for a callback of a ``fit``, to whose own source ``function`` returns.

        The ``fit`` compares the batches itself, at the end of an epoch.
        """
        before = function.is_first_call, function.has_own_data
        has_own_data = arguments.get("x") is not function.source
        if has_own_data:
            # Where each rank has its part, a difference is an error, but not in the batches before.
            self._compare_batches()
            function.has_own_data = True
        try:
            returned = arguments.call()
            if has_own_data:
                self._compare_batches()
        finally:
            function.source = source_of_fit
            if function is self.test:
                # The first batches of the validation data are still to be compared.
                function.is_first_call, function.has_own_data = before
        return returned

    def _prepared(
        self, function: Function, own_method: Callable, args: Any, kwargs: Any
    ) -> Arguments:
        """Return the arguments of a call on this rank, whose data ``function`` is going to compare among the ranks."""
        arguments = Arguments(self.model, own_method, args, kwargs)
        function.source = arguments.get("x")
        if function is not self.predict:
            self._replace_own_data(arguments, "x")
        elif isinstance(function.source, OwnData):
            raise TypeError(
                "predict gives the results of the whole data, in their order, and takes them whole; found data of "
                "npu.distribute.divided or pipeline.\nWhat to do: pass all of the data on every rank."
            )
        if not self.world.is_main:
            arguments.set("verbose", 0)
        return arguments

    def _replace_own_data(self, arguments: Arguments, name: str) -> None:
        """Replace data of which each rank has its own part by what Keras takes."""
        source = arguments.get(name)
        sequence = compat.keras_of(self.model).utils.Sequence
        if isinstance(source, Pipeline):
            arguments.set(name, source.for_keras)
        elif isinstance(source, OwnData):
            arguments.set(name, with_equal_length(self.world, source))
        elif isinstance(source, sequence) and callable(getattr(source, "rows", None)):
            arguments.set(name, sequence_of_rank(self.world, self.model, source))

    def _compare_batches(self) -> None:
        """Compare what the ranks' steps were given since the last comparison."""
        functions = {function.mode: function for function in (self.train, self.test, self.predict)}
        checksums = {mode: function.checksum.pop() for mode, function in functions.items()}
        own_data = [mode for mode, function in functions.items() if function.has_own_data]
        for mode in modes_that_differ(self.world, checksums, self.in_fit, own_data):
            functions[mode].set_batches_from_root(True)


def replica_of(model: Any) -> Replica | None:
    return vars(model).get(_REPLICA)


def replicate(model: Any, shard_optimizer: bool | None = None) -> Any:
    """Make ``fit``, ``evaluate`` and ``predict`` of a Keras model give the single-process result on all ranks.

    Args:
        model: a Keras model, of Keras 3 or tf-keras, compiled or not yet.
        shard_optimizer: divide the updates of the optimizers among the ranks (ZeRO stage 1), with the same result; see
            ``DistributedOptimizer``. Default: ``NPU_DEVICE_SHARD_OPTIMIZER``. The same on every rank.

    Returns:
        The same object; on a single device untouched.

    Raises:
        TypeError: not a Keras model.
        ValueError: the model was made under a strategy of ``tf.distribute`` other than ``OneDeviceStrategy``.
        RuntimeError: the environment names several ranks, but the job can't be joined any more.

    Where a model, loss or step can't be divided among ranks, the first step raises an error or prints a warning:
    docs/differs.md lists them, with what to change. ``npurun verify`` compares a whole script with one process.
    """
    if not all(hasattr(model, name) for name in ("fit", "train_step", "make_train_function")):
        raise TypeError(
            f"expected a Keras model; found a {type(model).__module__}.{type(model).__name__}"
        )
    ranks = world_unless_child()
    if ranks is not None and replica_of(model) is None:
        require_no_strategy(model)
        # It puts itself on the model.
        Replica(ranks, model, shard_optimizer)
    return model


class Arguments:
    """What a call passes to a method of a model; what that doesn't name itself is as in Keras's method."""

    def __init__(self, model: Any, method: Callable, args: Any, kwargs: Any) -> None:
        self._method = method
        self._args = list(args)
        self._kwargs = kwargs
        self._parameters = inspect.signature(method).parameters
        self._kinds = {parameter.kind for parameter in self._parameters.values()}
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._in_order = [
            name for name, parameter in self._parameters.items() if parameter.kind in by_position
        ]
        # Positional arguments are passed on in the order of Keras.
        if inspect.Parameter.VAR_POSITIONAL in self._kinds:
            own_method = getattr(compat.keras_of(model).Model, method.__name__)
            # Its first parameter is ``self``.
            names = list(inspect.signature(own_method).parameters)[1:]
            self._in_order += names[len(self._in_order) :]

    def get(self, name: str) -> Any:
        """Return an argument; None without it."""
        return {**self._kwargs, **dict(zip(self._in_order, self._args))}.get(name)

    def set(self, name: str, argument: Any) -> None:
        """Replace or add an argument; nothing happens if the method takes none of that name."""
        if name in self._in_order[: len(self._args)]:
            self._args[self._in_order.index(name)] = argument
        elif name in self._parameters or inspect.Parameter.VAR_KEYWORD in self._kinds:
            self._kwargs[name] = argument

    def call(self) -> Any:
        """Call the method with these arguments."""
        return self._method(*self._args, **self._kwargs)


# Callbacks, and what the ranks exchange at the end of each epoch.

_END_OF_EPOCH = "end of an epoch (earlier on ranks with fewer batches, or that set stop_training)"

_WRITE = ("CSVLogger", "TensorBoard", "RemoteMonitor", "BackupAndRestore", "OrbaxCheckpoint")
"""Keras's callbacks that write by themselves. ``ModelCheckpoint`` writes by the methods of the model."""

_SPEAK = ("ModelCheckpoint", "EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler")
"""Keras's callbacks that decide on every rank, and print what they do if ``verbose`` is set."""


def callbacks_of_rank(
    world: World, model: Any, callbacks: Any, compare_batches: Callable[[], None]
) -> Any:
    """Return the callbacks of ``fit`` on this rank: those that write only on rank 0, and one where the ranks meet."""
    kept = list(_listed(without_writing(world, callbacks)))
    for callback in _listed(callbacks):
        if _is_one_of(("ModelCheckpoint",), callback):
            # Keras 3 would make the directory on all ranks at once; one of them fails.
            directory = os.path.dirname(str(callback.filepath))
            # Keras fills in fields at the end of an epoch, and a URL is no directory.
            if directory and "{" not in directory and "://" not in directory:
                os.makedirs(directory, exist_ok=True)

    def agree_on_first_epoch(*_: Any) -> None:
        # Keras 3's BackupAndRestore may have set it on rank 0.
        if hasattr(model, "_initial_epoch"):
            model._initial_epoch = world.object_from_root(model._initial_epoch)

    def meet(*_: Any) -> None:
        """Wait for the other ranks when the files are there, stop together, and compare learning rates and batches."""
        own_rates = []
        for optimizer in training_state.optimizers(model):
            # The schedule of a legacy optimizer is no number.
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                own_rates.append(float(optimizer.learning_rate))
        reports = world.objects((bool(model.stop_training), own_rates), _END_OF_EPOCH)
        # A rank that stopped alone would leave the others waiting in the next epoch.
        model.stop_training = any(stops for stops, _ in reports)
        _require_equal_rates(world, [rates for _, rates in reports])
        compare_batches()

    # A class of Keras, since TensorFlow never frees the class of an object in a list that it was given
    # (``CachedTypeCheck`` in tensorflow/python/util/util.cc), nor what its methods refer to.
    with_calls = compat.keras_of(model).callbacks.LambdaCallback
    # Before callbacks write files, all ranks get the gradients that they have added up.
    settling = with_calls(on_epoch_end=lambda *_: settle(training_state.optimizer_state(model)))
    kept.insert(0, settling)
    meeting = with_calls(on_train_begin=agree_on_first_epoch, on_epoch_end=meet)
    if hasattr(callbacks, "callbacks"):
        # Keras hands the model to callbacks when it makes the list, which has been done.
        meeting.set_model(model)
    return _list_with([*kept, meeting], callbacks)


def without_writing(world: World, callbacks: Any) -> Any:
    """Return what a script passes as callbacks, on ranks but 0 without those that write."""
    if world.is_main:
        return callbacks
    kept = [each for each in _listed(callbacks) if not _is_one_of(_WRITE, each)]
    return _list_with(kept, callbacks)


def _list_with(kept: list, callbacks: Any) -> Any:
    """Return a list of callbacks like the one that a script passes: a copy of Keras's own list, or a plain one."""
    if not hasattr(callbacks, "callbacks"):
        return kept
    # Copied, since the list of the script may serve another call.
    own_list = copy.copy(callbacks)
    own_list.callbacks = kept
    return own_list


def _listed(callbacks: Any) -> Sequence:
    """Return what a script passes as callbacks as a list: one of them, several, Keras's own list, or None."""
    callbacks = getattr(callbacks, "callbacks", callbacks)
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        return callbacks
    return [callbacks]


@contextlib.contextmanager
def silent(world: World, callbacks: Any) -> Iterator[None]:
    """Let only rank 0 print what Keras's callbacks decide in the block."""
    with Replaced() as silenced:
        # All ranks decide alike, so that it is enough if one of them warns.
        if not world.is_main:
            for callback in _listed(callbacks):
                if _is_one_of(_SPEAK, callback):
                    silenced.keep(callback, "verbose")
                    callback.verbose = 0
        yield


def _is_one_of(names: Sequence[str], callback: Any) -> bool:
    classes = filter(compat.belongs_to_keras, type(callback).__mro__)
    return any(keras_class.__name__ in names for keras_class in classes)


def _require_equal_rates(world: World, rates: Sequence[list[float]]) -> None:
    # In the texts, NaN equals NaN.
    if len(set(map(repr, rates))) == 1:
        return
    lines = world.lines(", ".join(f"{rate:g}" for rate in rates_of_rank) for rates_of_rank in rates)
    raise RuntimeError(
        f"rank {world.job.cluster.rank}: the ranks have different learning rates at the end of an epoch:\n"
        f"{lines}\nLikely cause: a callback that changes the learning rate is passed on some ranks only.\n"
        "What to do: pass it on every rank; the logs are the same everywhere, so that it decides alike."
    )
