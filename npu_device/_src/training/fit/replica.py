"""``npu.distribute.replicate``, the one line for Keras. It replaces some methods of one model, and of no class."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training import training_state, xla
from npu_device._src.training.fit import files, keras_models, start, statement
from npu_device._src.training.fit.batches import again, pull
from npu_device._src.training.fit.current import CurrentStep, running
from npu_device._src.training.fit.divided import Divided, with_equal_length
from npu_device._src.training.fit.epochs import callbacks_of_rank, counters_from_root, silent
from npu_device._src.training.fit.optimizers import loss_is_weighted, replicate_optimizer
from npu_device._src.training.fit.running_checksum import RunningChecksum
from npu_device._src.training.fit.share import Share, is_divided, rows_of
from npu_device._src.training.fit.sources import can_be_sent, kinds_that_differ, same_everywhere, warn_if_all_the_same
from npu_device._src.training.fit.step import Step, gather_outputs, share_of
from npu_device._src.training.same_variables import warn_if_different
from npu_device._src.training.strategy_scope import require_no_strategy
from npu_device._src.training.world import World, world_unless_child

_REPLICA = "_npu_replica"
_log = logging.getLogger("npu_device")
_as_it_is = tf.autograph.experimental.do_not_convert


class Replica:
    """One model on this rank.

    A call of ``fit``, ``evaluate`` or ``predict`` goes to Keras's own method, which calls the model's train, test or
    predict function with each batch; these call the model's step. Before the first batch of a call the model is built
    and made equal on all ranks; each step works on this rank's share of the batch.
    """

    def __init__(self, world: World, model: Any) -> None:
        self._world = world
        self._model = model
        self._step: Step | None = None
        self._functions: dict[str, Any] = {}
        self._make: dict[str, Callable[..., Any]] = {}
        self._sent = {"train": False, "test": False, "predict": False}
        self._checksums = {kind: RunningChecksum() for kind in self._sent}
        self._unstarted = {"train", "test", "predict"}
        self._sources: dict[str, Any] = {}
        self._sendable: dict[str, bool] = {}
        self._depth = 0
        self._root = 0
        self._said = False
        self._building = False
        self._built: set[str] = set()  # kinds of functions before whose first batch all variables have been made
        self._steps: Callable[[], int | None] = lambda: None
        for kind in self._sent:
            self._replace(f"make_{kind}_function", self._maker(kind))
        self._replace("train_step", self._counting_step("train"))
        self._replace("test_step", self._counting_step("test"))
        self._replace("predict_step", self._predict_step())
        for name in files.METHODS:
            if hasattr(model, name):
                self._replace(name, files.saving(world, getattr(model, name)))
        if hasattr(model, "_maybe_load_initial_counters_from_ckpt"):
            counters = counters_from_root(world, model._maybe_load_initial_counters_from_ckpt)
            self._replace("_maybe_load_initial_counters_from_ckpt", counters)
        self._replace("fit", self._fit(model.fit))
        self._replace("evaluate", self._outside(model.evaluate, "test"))
        self._replace("predict", self._outside(model.predict, "predict"))
        object.__setattr__(model, _REPLICA, self)

    def _replace(self, name: str, hook: Callable[..., Any]) -> None:
        # Bypasses Keras's own __setattr__, which tracks what is to be saved.
        object.__setattr__(self._model, name, hook)

    def share(self) -> Share | None:
        """Return this rank's share in the step that is running or being traced; None outside a step."""
        return None if self._step is None else self._step.share

    def is_fits(self) -> bool:
        """Return True in a step, and while one is traced only to make its variables."""
        return self._step is not None or self._building

    def build(self, kind: str, batch: Any) -> None:
        """Make all variables that a step of a kind needs (see ``start.build``), before its first batch."""
        if kind not in self._built:
            self._built.add(kind)
            self._building = True
            try:
                start.build(self._model, kind, _content(batch))
            finally:
                self._building = False

    def start_from(self, root_rank: int) -> None:
        """Let the next training start from the variables of another rank than 0."""
        self._root = root_rank

    # Steps. tf-keras has AutoGraph rewrite them, for the sake of custom ones.

    def _counting_step(self, kind: str) -> Callable[[Any], Any]:
        own = getattr(self._model, f"{kind}_step")

        def step(data: Any) -> Any:
            mine = self._begin(data, kind)
            with running(self._current()):
                logs = own(mine)
            return self._end(logs)

        return step

    def _predict_step(self) -> Callable[[Any], Any]:
        own = self._model.predict_step

        def predict_step(data: Any) -> Any:
            share = self._share(data, "predict")
            with running(self._current_with(share)):
                mine = own(share.data)
            outputs = gather_outputs(self._world, share, mine)
            return own(data) if outputs is None else outputs

        return predict_step

    @_as_it_is
    def _begin(self, data: Any, kind: str) -> Any:
        if self._step is not None:  # one that failed
            self._step.abandon()
        self._step = None
        share = self._share(data, kind)
        self._step = Step(self._world, self._model, share, training=kind == "train")
        return share.data

    @_as_it_is
    def _current(self) -> CurrentStep:
        assert self._step is not None
        return self._current_with(self._step.share)

    @_as_it_is
    def _current_with(self, share: Share) -> CurrentStep:
        optimizers = training_state.optimizers(self._model)
        own = not compat.belongs_to_keras(type(self._model).train_step)
        world = self._world
        return CurrentStep(share, own, world.reduce, world.gather, lambda: any(map(loss_is_weighted, optimizers)))

    @_as_it_is
    def _share(self, data: Any, kind: str) -> Share:
        if not self._sent[kind] and not is_divided(data):
            self._checksums[kind].add(data)
        return share_of(self._world, data, self._sent[kind])

    @_as_it_is
    def _end(self, logs: Any) -> Any:
        step, self._step = self._step, None
        assert step is not None
        return step.end(logs)

    # Functions that Keras calls with one batch or several.

    def _maker(self, kind: str) -> Callable[..., Any]:
        name = f"{kind}_function"
        self._make[kind] = getattr(self._model, f"make_{name}")

        def function(batches: Any) -> Any:
            if kind in self._unstarted:
                self._unstarted.discard(kind)
                batches = self._start(kind, batches)
            return self._functions[kind](batches)

        def make_function(force: bool = False) -> Any:
            self._prepare(kind)
            if getattr(self._model, name) is not function or force:  # also after compile
                self._built.discard(kind)
                self._unstarted.add(kind)
                self._make_anew(kind)
                setattr(self._model, name, function)
            return function

        return make_function

    def _make_anew(self, kind: str) -> None:
        setattr(self._model, f"{kind}_function", None)
        self._make[kind](True)
        self._functions[kind] = getattr(self._model, f"{kind}_function")

    def _prepare(self, kind: str) -> None:
        xla.turn_off(self._model)
        if getattr(self._model, "autotune_steps_per_execution", False):
            # tf-keras would choose the number by the time that this rank takes; its callbacks would run at other steps.
            self._model.autotune_steps_per_execution = False
            if self._world.is_main:
                _log.warning("steps_per_execution='auto' is 1 in a replicated model: ranks would choose other numbers.")
        if kind != "train":
            return
        for optimizer in training_state.optimizers(self._model):
            replicate_optimizer(optimizer, self._world, self)

    def _start(self, kind: str, batches: Any) -> Any:
        """Build the model, make it equal on all ranks, and check that they read the same data."""
        self._checksums[kind].take()  # what an interrupted call has left
        several = isinstance(batches, list)  # what Keras 3 predicts
        pulled = batches if several else pull(batches, keras_models.steps_per_call(self._model))
        if pulled:
            self.build(kind, pulled[0])
        if kind == "train" or not self._depth:
            root, self._root = self._root, 0
            start.synchronise(self._world, self._model, training=kind == "train", root_rank=root)
        self._sendable[kind] = bool(pulled) and can_be_sent(batches, pulled[0])
        own_data = bool(pulled) and is_divided(pulled[0])
        if kind == "train" and pulled and not self._said:
            self._said = True
            rows = None if own_data else int(rows_of(pulled[0]))
            statement.report(self._world, self._model, rows, self._steps())
        if own_data:
            warn_if_all_the_same(self._world, start.digest(pulled))
        else:
            rows = int(rows_of(pulled[0])) if pulled else 0
            self._send(kind, not same_everywhere(self._world, self._sources.get(kind), start.digest(pulled), rows))
        return batches if several else again(batches, pulled)

    def _send(self, kind: str, sent: bool) -> None:
        if sent and not self._sendable[kind]:
            raise ValueError(
                "rank 0's batches can't be sent to all ranks: they have strings, sparse or ragged tensors, or sizes "
                "that vary.\nWhat to do: give all ranks the same batches, by a seed wherever they are shuffled."
            )
        if sent != self._sent[kind]:
            self._sent[kind] = sent
            function = getattr(self._model, f"{kind}_function")
            self._make_anew(kind)
            setattr(self._model, f"{kind}_function", function)

    def _compare_batches(self) -> None:
        """Compare what the ranks' steps were given since the last comparison."""
        found = {kind: checksum.take() for kind, checksum in self._checksums.items()}
        for kind in kinds_that_differ(self._world, found, in_fit=self._depth > 0):
            self._send(kind, True)

    # The methods that the user calls.

    def _fit(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def fit(*args: Any, **kwargs: Any) -> Any:
            bound = self._bind(own, args, kwargs, "train")
            validation = bound.arguments.get("validation_data")
            self._sources["test"] = validation
            if isinstance(validation, Divided):
                bound.arguments["validation_data"] = with_equal_length(self._world, validation)
            given = bound.arguments.get("callbacks")
            callbacks = bound.arguments["callbacks"] = callbacks_of_rank(
                self._world, self._model, given, self._compare_batches
            )
            self._steps = lambda: _steps(callbacks)
            start.share_random_state(self._world)
            self._unstarted |= {"train", "test"}
            self._depth += 1
            try:
                with silent(self._world, self._model, callbacks):
                    history = own(*bound.args, **bound.kwargs)
            finally:
                self._depth -= 1
            if "train" in self._unstarted:  # no epoch was left to train
                start.synchronise(self._world, self._model, training=True)
            warn_if_different(self._world, training_state.weights(self._model))  # and so waits for rank 0's files
            return history

        return fit

    def _outside(self, own: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                bound = inspect.signature(own).bind(*args, **kwargs)
                if not self._world.is_main:
                    bound.arguments["verbose"] = 0
                return own(*bound.args, **bound.kwargs)
            bound = self._bind(own, args, kwargs, kind)
            self._unstarted.add(kind)
            result = own(*bound.args, **bound.kwargs)
            self._compare_batches()
            return result

        return call

    def _bind(self, own: Callable[..., Any], args: Any, kwargs: Any, kind: str) -> inspect.BoundArguments:
        bound = inspect.signature(own).bind(*args, **kwargs)
        source = self._sources[kind] = bound.arguments.get("x")
        if isinstance(source, Divided):
            if kind == "predict":
                raise TypeError(
                    "predict gives the results of the whole data, in their order, and takes them whole; found "
                    "npu.distribute.divided data.\nWhat to do: pass all of the data on every rank."
                )
            bound.arguments["x"] = with_equal_length(self._world, source)
        if not self._world.is_main:
            bound.arguments["verbose"] = 0
        return bound


def _content(batch: Any) -> Any:
    """Return a batch in the form that the model's step gets."""
    if not is_divided(batch):
        return batch
    if isinstance(batch, dict):
        return batch["x"]
    return (batch[0]["x"], *batch[1:])


def _steps(callbacks: Any) -> int | None:
    """Return the number of steps per epoch that Keras has told the callbacks."""
    last = callbacks[-1] if isinstance(callbacks, list) else callbacks
    return (getattr(last, "params", None) or {}).get("steps")


def replica_of(model: Any) -> Replica | None:
    """Return the ``Replica`` behind a replicated model; None for another one."""
    return vars(model).get(_REPLICA)


def replicate(model: Any) -> Any:
    """Make a Keras model's ``fit``, ``evaluate`` and ``predict`` do on all ranks together what one process does.

    Args:
        model: a Keras model, of Keras 3 or tf-keras, compiled or not yet.

    Returns:
        The same object; on a single device untouched.

    Raises:
        TypeError: not a Keras model.
        ValueError: the model was made under a strategy of ``tf.distribute`` for several devices.
        RuntimeError: the environment names several ranks, but the job can't be joined any more.
    """
    if not all(hasattr(model, name) for name in ("fit", "train_step", "make_train_function")):
        raise TypeError(f"expected a Keras model; found a {type(model).__module__}.{type(model).__name__}")
    ranks = world_unless_child()
    if ranks is not None and replica_of(model) is None:
        require_no_strategy(model)
        Replica(ranks, model)
    return model
