"""Variables that hold a partial sum of this rank: there optimizers add up gradients between two updates.

They differ between ranks, are no cause for a warning, and go on after a broadcast. One process has the mean of
all ranks' partial sums.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import ReductionOptions
from npu_device._src.threads import ThreadSwitch
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")

_ONLY_OF_RANK = (
    "rank %d writes the state of the optimizer %s %d of %d steps after an update. The file doesn't have the gradients "
    "that the other ranks have added up since then: a run that resumes from it makes its next update without them.\n"
    "What to do: save after a multiple of %d steps, or after an epoch of a replicated model's fit; or use "
    "npu.train.FitCheckpoint or JobCheckpoint, which keep the gradients of all ranks. A model that isn't trained "
    "further needs no change."
)


@dataclass
class _Accumulation:
    """The gradients that an optimizer adds up.

    Attributes:
        world: the ranks that add up.
        counter: the variable that counts the steps.
        period: steps from one update to the next.
        settled: the count of steps when all ranks got the means.
        is_told: it was warned of a file.
    """

    world: World
    counter: Any
    period: int
    settled: int = -1
    is_told: bool = False

    def count(self) -> int:
        """Return the number of steps."""
        return int(self.counter)

    def steps_since_update(self) -> int:
        """Return the number of steps since the last update."""
        return self.count() % self.period


_ACCUMULATION = "_npu_accumulation"
"""The attribute of TensorFlow's variable that holds a partial sum: the ``_Accumulation`` that it is part of."""


def note_partial_sums(world: World, variables: Sequence, counter: Any, period: int) -> None:
    """Note the variables of an optimizer that hold partial sums from now on; every ``period`` steps they are 0."""
    if all(map(is_partial_sum, variables)):
        return
    accumulation = _Accumulation(world, counter, period)
    for variable in map(compat.inner_variable, variables):
        setattr(variable, _ACCUMULATION, accumulation)


def is_partial_sum(variable: Any) -> bool:
    """Return whether a variable holds a partial sum of this rank."""
    return hasattr(compat.inner_variable(variable), _ACCUMULATION)


def without_partial_sums(variables: Iterable) -> list:
    """Return the variables that are to have the same value on all ranks."""
    return [variable for variable in variables if not is_partial_sum(variable)]


def between_updates(variables: Iterable) -> list:
    """Return the variables that hold partial sums now, which the next update is going to use."""
    partial_sums = filter(is_partial_sum, variables)
    return [
        variable for variable in partial_sums if _accumulation_of(variable).steps_since_update() > 0
    ]


def _accumulation_of(variable: Any) -> _Accumulation:
    accumulation: _Accumulation = getattr(compat.inner_variable(variable), _ACCUMULATION)
    return accumulation


def _world_of(variable: Any) -> World:
    return _accumulation_of(variable).world


def means_of(variables: Sequence) -> list[tf.Tensor]:
    """Return the means of variables that hold partial sums; all ranks with the variables call this, too."""
    means: dict[int, tf.Tensor] = {}
    # Optimizers may reduce among different groups of ranks.
    worlds = {world.group.name: world for world in map(_world_of, variables)}
    for name, world in worlds.items():
        partial_sums = [
            variable for variable in variables if _world_of(variable).group.name == name
        ]
        tensors = list(map(tf.convert_to_tensor, partial_sums))
        means.update(zip(map(id, partial_sums), world.reduce(tensors, ReductionOptions("mean"))))
    return [means[id(variable)] for variable in variables]


def settle(variables: Iterable) -> None:
    """Give all ranks the means of the partial sums among some variables; every rank calls this."""
    partial_sums = between_updates(variables)
    for variable, mean in zip(partial_sums, means_of(partial_sums)):
        variable.assign(mean)
        # Until the next step, a file has the values of all ranks.
        _accumulation_of(variable).settled = _accumulation_of(variable).count()


def to_be_equal(world: World, variables: Sequence) -> list:
    """Return variables that are about to be made equal, without partial sums that go on.

    They go on if all ranks have made the same number of steps. If not, one rank has read a file, and its values count.
    Every rank calls this.
    """
    accumulations = [
        _accumulation_of(variable) for variable in variables if is_partial_sum(variable)
    ]
    if not accumulations:
        return list(variables)
    if tf.executing_eagerly():
        counts = [accumulation.count() for accumulation in accumulations]
        counts_by_rank = world.objects(counts, "steps of optimizers that add up gradients")
        goes_on = any(accumulation.steps_since_update() for accumulation in accumulations)
        if not goes_on or any(row != counts for row in counts_by_rank):
            return list(variables)
    return without_partial_sums(variables)


# Files


for_all_ranks = ThreadSwitch()
"""Lets a thread write files without a warning: they have the partial sums of all ranks."""


@contextlib.contextmanager
def with_values(variables: Sequence, values: Sequence) -> Iterator[None]:
    """Let variables have other values in the block."""
    before = list(map(tf.convert_to_tensor, variables))
    try:
        for variable, value in zip(variables, values):
            variable.assign(value)
        yield
    finally:
        for variable, value in zip(variables, before):
            variable.assign(value)


def _warn_of_file(optimizer: Any, variables: Iterable) -> None:
    """Warn, once for an optimizer, if this rank is about to write its own partial sums to a file."""
    if for_all_ranks.is_on or not tf.executing_eagerly():
        return
    for accumulation in map(_accumulation_of, between_updates(variables)):
        is_settled = accumulation.settled == accumulation.count()
        if accumulation.world.size == 1 or accumulation.is_told or is_settled:
            continue
        accumulation.is_told = True
        rank = accumulation.world.job.cluster.rank
        name = type(optimizer).__name__
        period = accumulation.period
        steps = accumulation.steps_since_update()
        _log.warning(_ONLY_OF_RANK, rank, name, steps, period, period)


def methods_that_warn(partial_sums: Callable[[Any], Iterable]) -> dict[str, Callable]:
    """Return stand-ins for the methods by which an optimizer writes its variables to files. They warn if the rank is
    about to write its own partial sums, which ``partial_sums`` returns of an optimizer.
    """

    def stand_in(name: str) -> Callable:
        # Otherwise AutoGraph would rewrite the method.
        @compat.do_not_convert
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Where TensorFlow asks for the parts of an optimizer, it tells what it is about to write.
            if "savedmodel" not in (*args, *kwargs.values()):
                _warn_of_file(self, partial_sums(self))
            return getattr(type(self), name)(self, *args, **kwargs)

        return write

    return {name: stand_in(name) for name in ("save_own_variables", "_trackable_children")}
