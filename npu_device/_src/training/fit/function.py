"""The train, test and predict function of a replicated model: what Keras calls with each batch, or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from npu_device._src import compat, environment
from npu_device._src.collectives.engine_text import say
from npu_device._src.training.fit import first_step, randomness, sources, start, xla
from npu_device._src.training.fit.divided import OwnData
from npu_device._src.training.fit.model_objects import objects_of
from npu_device._src.training.fit.randomness import RandomNumbers
from npu_device._src.training.fit.step import share_of_rank
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.fit.weighting import replicate_optimizer
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.wrapped_optimizers import reducer_of, reducing_optimizer
from npu_device._src.world.share import Share, content, is_tagged, mark_of, require_units, rows_of
from npu_device._src.world.world import World

INNER = "_npu_inner"
"""The attribute of a callback's function, around one of a model, that has the latter."""

_TRACED = (
    "Likely cause: the model runs eagerly, but is traced once before its first step, to make its variables, and traced "
    "tensors have no values.\nWhat to do: return tensors from the step, not value.numpy(). If the model's call needs "
    "values, compile it and call model.test_on_batch with a few samples before npu.distribute.replicate (Keras 3)."
)


@dataclass(eq=False)
class ReplicaState:
    """What the functions of one replicated model share: its state between the calls of Keras.

    Attributes:
        in_fit: a ``fit`` is running.
        root_rank: from whose variables the next training starts.
        callbacks: of the newest ``fit``.
        shard_optimizer: divide the updates of the optimizers among the ranks; None: as NPU_DEVICE_SHARD_OPTIMIZER says.
    """

    world: World
    model: Any
    shard_optimizer: bool | None = None
    callbacks: Any = None

    in_fit = False
    root_rank = 0
    _is_reported = False

    def report(self, optimizers: list, rows: int | None, checked: str) -> None:
        """Print the statement at the start, once; ``rows`` are those of the first batch, None of own data."""
        if self._is_reported or not self.world.is_main:
            return
        self._is_reported = True
        callback = self.callbacks
        # The last callback is the package's own, in which the ranks meet: Keras has set its ``params``.
        if isinstance(callback, list):
            callback = callback[-1]
        steps = (getattr(callback, "params", None) or {}).get("steps")
        say(start.statement(self.world, self.model, optimizers, rows, steps, checked))


class Function(StepContext):
    """One of the three functions of a model, around the one that Keras makes; the first call makes the ranks ready.

    Attributes:
        source: the data that the user passed.
        is_first_call: its next call is the first one of a fit, evaluate or predict.
    """

    def __init__(self, replica: ReplicaState, mode: str) -> None:
        own_step = getattr(replica.model, f"{mode}_step")
        super().__init__(replica.world, replica.model, mode, own_step)
        self.source: Any = None
        self.is_first_call = True
        self._replica = replica
        self._name = f"{mode}_function"  # the attribute of the model from which Keras gets it
        self._make_keras_function: Callable = getattr(self.model, f"make_{mode}_function")
        # Keras's own function: calls ``train_step`` or the like of the model, which is ``step``'s, with each batch.
        self._keras_function: Callable[[Any], Any]
        self._is_built = False
        self._is_checked = False  # by the first-step check
        self._has_told_draws = False
        self._input_wait = sources.InputWait()
        # Only rank 0 says how long it waits, and only in training.
        self._input_wait.is_over = mode != "train" or not self.world.is_main

    def make(self, force: bool = False) -> Callable:
        """Make the function of the model, unless it is there; Keras calls this at the beginning of each ``fit``."""
        xla.compile_call_only(self.model)
        start.keep_steps_per_execution(self.world, self.model)
        if self.mode == "train":
            for optimizer in training_state.optimizers(self.model):
                replicate_optimizer(optimizer, self.world, self._replica.shard_optimizer)
        called_by_keras = getattr(self.model, self._name)
        # ``compile`` drops the function, so that a new one is made after it.
        if getattr(called_by_keras, INNER, called_by_keras) is self and not force:
            return called_by_keras
        self.is_first_call = True
        self._is_built = False
        self._is_checked = False
        self._make_anew()
        return self

    def _make_anew(self) -> None:
        self.predicts_rows.clear()
        # Keras makes its function only where there is none.
        setattr(self.model, self._name, None)
        self._make_keras_function(True)
        self._keras_function = getattr(self.model, self._name)
        setattr(self.model, self._name, self)

    def __call__(self, batches: Any) -> Any:
        """Run a step, or several; Keras calls this with an iterator, or (to predict, in Keras 3) with a list."""
        # Set by each ``fit``, ``evaluate`` and ``predict``.
        if self.is_first_call:
            self.is_first_call = False
            batches = self._start(batches)
        # In a running training, one comparison leads to Keras's own function.
        if self._input_wait.is_over:
            return self._keras_function(batches)
        steps = compat.steps_per_call(self.model)
        return self._input_wait.call(self._keras_function, batches, steps, self.has_own_data)

    def _start(self, batches: Any) -> Any:
        """Make the ranks ready at the first call of a ``fit``, and return the batches with the first one put back.

        The first batch is taken, all variables are built from it and sent by rank 0, the first batches are compared,
        and the first step is checked with variables that are equal by then.
        """
        is_training = self.mode == "train"
        # An interrupted call may have left a checksum.
        self.checksum.pop()
        first_batches = batches
        # Keras 3 hands lists to its function for predictions.
        is_iterator = not isinstance(batches, list)
        if is_iterator:
            first_batches = sources.pull(batches, compat.steps_per_call(self.model))
        self.has_own_data = bool(first_batches) and is_tagged(first_batches[0])
        if first_batches:
            if not self.has_own_data and environment.NPU_DEVICE_DIVISION.get() == "alike":
                require_units(first_batches[0], self.world.size)
            self.build(batches, first_batches[0])
        if is_training or not self._replica.in_fit:
            root_rank = self._replica.root_rank
            start.set_variables_from_root(self.world, self.model, is_training, root_rank)
            # A broadcast callback names its root for one start only.
            self._replica.root_rank = 0
        # Building may have added layers and variables.
        self.objects = objects_of(self.model)
        # Of own data, each rank knows the number of its own samples only.
        rows = None
        if first_batches and not self.has_own_data:
            rows = int(rows_of(first_batches[0]))
        self._compare_first_batches(first_batches, rows or 0)
        if first_batches and not self._is_checked:
            if is_training:
                checked = first_step.check(self, content(first_batches[0]))
                self._replica.report(self._optimizers_of_step(), rows, checked)
            elif self.mode == "test":
                first_step.find_sums(self, content(first_batches[0]))
            self._is_checked = True
        if is_iterator:
            return sources.with_put_back(batches, first_batches)
        return batches

    def build(self, batches: Any, batch: Any) -> None:
        """Make all variables that a step needs, before its first one, given the first batch."""
        if self._is_built:
            return

        def own_part(batch: Any) -> Any:
            return share_of_rank(self.world, batch).data

        spec = start.spec_of(self.model, batches, batch)
        if self.mode == "train":
            for _, reducer in self._reducers():
                reducer.has_applied = False
        try:
            start.build(self.model, self.mode, self.own_step, spec, own_part)
        except Exception as error:
            first_step.require_divisible(self, spec, own_part, content(batch), error)
            may_need_values = isinstance(error, (AttributeError, TypeError, NotImplementedError))
            if self.model.run_eagerly and may_need_values:
                raise RuntimeError(f"{type(error).__name__}: {error}\n{_TRACED}") from error
            raise
        self._is_built = True

    def _reducers(self) -> list[tuple[Any, Any]]:
        """Return the optimizers that a step can reach, each with its reducer."""
        optimizers = training_state.optimizers(self.model)
        reducers = map(reducer_of, map(reducing_optimizer, optimizers))
        return [pair for pair in zip(optimizers, reducers) if pair[1] is not None]

    def _optimizers_of_step(self) -> list:
        """Return the optimizers that a step calls, once it is built: a GAN has one by ``compile`` that never steps."""
        if not self.is_custom:
            return list(filter(None, [self.model.optimizer]))
        return [optimizer for optimizer, reducer in self._reducers() if reducer.has_applied]

    def _compare_first_batches(self, first_batches: list, rows: int) -> None:
        """Compare the batches of all ranks; if they should be the same and aren't, rank 0 sends its own."""
        if not self.has_own_data:
            checksum = start.full_checksum(first_batches)
            are_same = sources.first_batches_are_same(self.world, self.source, checksum, rows)
            self.set_batches_from_root(not are_same)
        elif type(self.source) is OwnData:
            # A rank may have any rows of its own, but not the same rows as all others.
            sources.warn_of_same_batches(self.world, start.full_checksum(first_batches))
        else:
            # A pipeline marks the batches from which the ranks take their rows.
            sources.require_same_mark(self.world, int(mark_of(first_batches[0])))

    def set_batches_from_root(self, is_on: bool) -> None:
        """Let the batches of rank 0 be sent to all ranks from now on, or not any more, with a new function of Keras:
        the traced one has this setting in it. The batch that was taken already is sent, too.
        """
        if is_on != self.batches_from_root:
            self.batches_from_root = is_on
            # In a ``fit``, this may be a callback's function around Keras's, which stays.
            called_by_keras = getattr(self.model, self._name)
            self._make_anew()
            setattr(self.model, self._name, called_by_keras)

    def after_draws(self, numbers: RandomNumbers, share: Share) -> None:
        """Let all ranks have the same draws for the whole batch, and report once on all draws."""
        draws = numbers.make_common(share.data, training_state.weights(self.model))
        if draws and self.world.is_main and not self._has_told_draws:
            self._has_told_draws = True
            say(randomness.lines(self.model, draws))
