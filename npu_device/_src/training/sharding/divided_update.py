"""The update of one optimizer of Keras 3 or tf-keras, divided among the ranks: ZeRO stage 1.

Each rank gets the reduced gradients of the variables that it owns, applies them by the optimizer's own class, and sends
the new values to the others. The optimizer keeps its whole structure; slots of variables that another rank owns have no
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.ops import all_reduce, broadcast_from_owners
from npu_device._src.gradients.reduction import Gradient, dense_of
from npu_device._src.trace.trace import changes_a_variable, mark_update_end
from npu_device._src.training.sharding.remote_slots import OptimizerSlots
from npu_device._src.training.sharding.shares import bytes_of, owners_of
from npu_device._src.training.watching.same_variables import spread_from_owners
from npu_device._src.training.watching.schedule import only_building
from npu_device._src.world.world import World


class DividedUpdate:
    """The shares of the ranks in one optimizer, and the updates that this rank makes."""

    def __init__(self, world: World, optimizer: Any, keeps_all_averages: bool) -> None:
        self.optimizer = optimizer
        # True if each rank keeps the moving averages of all variables, not only of its share.
        self.keeps_all_averages = keeps_all_averages
        self._world = world
        self._trained: list = []  # in the order of the slots
        self._owners: dict[int, int] = {}  # by the id of TensorFlow's variable
        self._slots = OptimizerSlots(world.job, world.group)
        self._is_building = False
        self._is_apart = False
        self._counted: list[tuple[int, tf.DType]] = []  # owners and dtypes of what a norm is of
        # Sends new values within an update, before averages are computed from them.
        self._send_before_averages: Callable[[], Any] | None = None

    # Shares

    def build(self, build: Callable[[Sequence], None], variables: Sequence) -> str:
        """Build the optimizer, with memory for the slots of this rank only. Return why it can't be divided, or ""."""
        if compat.is_optimizer_built(self.optimizer):
            return self._adopt(variables)
        self._plan(variables)
        self._is_building = True
        try:
            build(variables)
        finally:
            self._is_building = False
        return self._undo_if_not_exact()

    def _plan(self, variables: Sequence) -> None:
        self._trained = list(variables)
        owners = owners_of(variables, self._world.size)
        self._owners = dict(zip(map(_key, variables), owners))

    def owner_of(self, variable: Any) -> int | None:
        """Return the owner of a variable, a rank of the group; None if the optimizer isn't built for it."""
        return self._owners.get(_key(variable))

    def owners(self, variables: Sequence) -> list[int] | None:
        """Return the owner of each variable; None if the optimizer isn't built for one, which Keras refuses."""
        owners = []
        for variable in variables:
            owner = self.owner_of(variable)
            if owner is None:
                return None
            owners.append(owner)
        return owners

    def add_slot(self, slot: Any, variable: Any, initial_value: Any) -> None:
        """Note a slot of a variable if the optimizer is being built; unless this rank owns it, free its memory."""
        owner = self.owner_of(variable)
        if not self._is_building or owner is None:
            return
        self._note(slot, owner)
        is_remote = owner != self._world.rank
        if is_remote:
            compat.watch_reads(slot)
        # tf-keras's averages begin with the weights of this rank, and need no memory of their own: TensorFlow copies
        # what is assigned only when an update changes it.
        if initial_value is variable:
            compat.share_of(slot).weight = variable
        elif is_remote:
            compat.free_until_first_step(slot)

    def _note(self, slot: Any, owner: int) -> None:
        self._slots.add(slot, self._world.group.ranks[owner])

    @property
    def is_planned(self) -> bool:
        """Return whether each variable has its owner."""
        return bool(self._trained)

    def adopt(self) -> str:
        """Note the slots of an optimizer that is built already, which it keeps until the first step. Return why it
        can't be divided, or "".
        """
        is_tf_keras = not compat.of_keras_3(self.optimizer)
        # The first step of one of tf-keras tells its variables. One that isn't built is built by then.
        if is_tf_keras or not compat.is_optimizer_built(self.optimizer):
            return ""
        return self._adopt(())

    def _adopt(self, variables: Sequence) -> str:
        trained = compat.trained_in_order(self.optimizer, variables)
        if trained is None:
            return "it was built for other variables than those of its first step"
        self._plan(trained)
        whole_ids = set(map(id, self._whole_slots()))
        for slots in compat.lists_of_slots(self.optimizer, trained):
            for slot, variable in zip(slots, trained):
                owner = self.owner_of(variable)
                if slot is not None and owner is not None and id(slot) not in whole_ids:
                    self._note(slot, owner)
                    if owner != self._world.rank:
                        compat.watch_reads(slot)
        return self._undo_if_not_exact()

    def _whole_slots(self) -> list:
        if self.keeps_all_averages:
            return compat.averages_of(self.optimizer)
        return []

    def _undo_if_not_exact(self) -> str:
        # Give a built optimizer all slots back if it keeps state outside of them.
        undivided = compat.undivided_state(self.optimizer, self._whole_slots())
        if not undivided:
            return ""
        self.undo()
        # The first three names tell what it is about.
        names = ", ".join(map(compat.path_of, undivided[:3]))
        return f"it keeps state that isn't that of one variable: {names}"

    def undo(self) -> None:
        """Give the optimizer all slots back, before the first step."""
        for slot in self._slots.variables:
            compat.make_whole(slot)
        self._slots.variables.clear()
        self._owners = {}
        self._trained = []

    @property
    def bytes_of_state(self) -> tuple[int, int]:
        """Return the size of the slots that this rank holds, and of all slots."""
        rank = self._world.job.cluster.rank
        slots = self._slots.variables
        owned = [slot for slot in slots if compat.share_of(slot).owner == rank]
        return sum(map(bytes_of, owned)), sum(map(bytes_of, slots))

    def prepare(self, optimizer: Any, variables: Sequence) -> None:
        """Build the optimizer, or the loss-scale optimizer around it, for all variables, before a step builds it for
        those of this rank.
        """
        # Built outside of the function that is traced, so that slots have values before its first run.
        if compat.of_keras_3(optimizer):
            with tf.init_scope():
                compat.build_optimizer(optimizer, list(variables))
        elif not self.is_planned:
            # In the scope in which tf-keras builds it, for the same names.
            with tf.name_scope(optimizer.name or "optimizer"), tf.init_scope():
                optimizer.build(list(variables))
        if not only_building.is_on:
            self._slots.register(self)

    def part_if(self, are_equal: bool) -> None:
        """Leave each slot to its owner, once all ranks have the same values."""
        if self._is_apart or not are_equal or only_building.is_on:
            return
        self._is_apart = True
        self._slots.begin()
        for slot in self._slots.variables:
            share = compat.share_of(slot)
            share.is_apart = True
            if share.owner == self._world.job.cluster.rank:
                compat.make_own(slot)
            else:
                compat.make_remote(slot)
        if not self.keeps_all_averages:
            compat.lend_averages(self.optimizer, self._lend_averages)

    # The update

    def apply(
        self,
        apply: Callable,
        gradients: Sequence[Gradient],
        variables: Sequence,
        reduce: Callable[[list[int]], Sequence[Gradient]],
        is_update: tf.Tensor | None = None,
    ) -> Any:
        """Reduce gradients to the owners of the variables, update this rank's variables, and send their values.

        Args:
            apply: the method of the optimizer's class, given gradients and variables.
            reduce: returns the reduced gradients that this rank owns, None where there is none, and None or anything
                for the others.
            is_update: whether this step changes variables; else it accumulates gradients. None if all steps do.
        """
        ranks = self.owners(variables)
        with_gradient = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not with_gradient or ranks is None or len(gradients) != len(variables):
            # Keras refuses this on every rank.
            return apply(gradients, variables)
        reduced = reduce(ranks)
        counted = [index for index in with_gradient if not compat.is_overwritten(variables[index])]
        self._counted = [(ranks[index], dense_of(gradients[index]).dtype) for index in counted]
        share = [index for index in with_gradient if ranks[index] == self._world.rank]
        changed = self._changed(variables, with_gradient)
        # Each step applies constraints, which may change bits every time, and sets variables by their gradients.
        always_sent = list(filter(_changes_in_each_step, changed))
        earlier = len(_operations())
        if self.keeps_all_averages and not only_building.is_on:
            self._send_before_averages = partial(self._count_and_send, changed, earlier, is_update)
        arrived = [dense_of(reduced[index]) for index in share]
        arrived += self._joined([ranks[index] for index in with_gradient], is_update)
        settled = self._slots.settle(arrived, is_update)
        with tf.control_dependencies(settled), self._slots.updating.on():
            # What belongs to no variable changes on each rank, as Nadam's product of momenta does.
            if counted and not set(counted).intersection(share):
                compat.update_without_gradients(self.optimizer)
            if share:
                # Keras warns of variables without a gradient, on each rank.
                without_gradient = set(range(len(variables))).difference(with_gradient)
                applied_indices = sorted(without_gradient.union(share))
                own_gradients = [reduced[index] for index in applied_indices]
                applied = apply(own_gradients, [variables[index] for index in applied_indices])
            else:
                applied = compat.count_update(self.optimizer)
            is_sent = self.keeps_all_averages and self._send_before_averages is None
            self._send_before_averages = None
            if not is_sent and not only_building.is_on:
                # After slots have got what scripts have assigned, for which the number counts.
                self._slots.count_update(is_update)
        if only_building.is_on:
            return applied
        if is_sent:
            # Constraints are applied after averages.
            self._send(always_sent, always_sent, earlier, is_update)
        else:
            mark_update_end(self._changes_since(earlier))
            self._send(changed, always_sent, earlier, is_update)
        return applied

    def _joined(self, owners: Sequence[int], is_update: tf.Tensor | None) -> list[tf.Tensor]:
        """Return a tensor that exists once all ranks have come to this update, if the step makes one; nothing if each
        rank owns a gradient, which tells it.
        """
        if len(set(owners)) == self._world.size or only_building.is_on:
            return []

        def join() -> tf.Tensor:
            return all_reduce(self._world.job, tf.constant(0), "max", self._world.group)

        if is_update is None:
            return [join()]
        return [tf.cond(is_update, join, lambda: tf.constant(0))]

    def _count_and_send(self, changed: Sequence, earlier: int, is_update: tf.Tensor | None) -> None:
        """Count the update of the slots within the step, and give all ranks the new values of variables."""
        self._slots.count_update(is_update)
        mark_update_end(self._changes_since(earlier))
        self._send(changed, [], earlier, is_update)

    def _changed(self, variables: Sequence, with_gradient: Sequence[int]) -> list:
        """Return the variables that an update changes."""
        is_keras_3 = compat.of_keras_3(self.optimizer)
        if is_keras_3 and self.optimizer.use_ema and not self.keeps_all_averages:
            # Each update changes the averages of all variables, or the variables themselves.
            return self._trained
        return [variables[index] for index in with_gradient]

    def _changes_since(self, earlier: int) -> list[tf.Operation]:
        return list(filter(changes_a_variable, _operations()[earlier:]))

    def _send(
        self,
        changed: Sequence,
        always_sent: Sequence,
        earlier: int,
        is_update: tf.Tensor | None,
    ) -> None:
        """Give all ranks the values that a step has changed; ``always_sent``: also in steps that only accumulate."""
        # A rank that has the new values may read the slots here, so they must have changed before the values are sent.
        with tf.control_dependencies(self._changes_since(earlier)):
            if is_update is None:
                self._spread(changed)
            elif changed or always_sent:
                # The ranks agree whether it is an update, as they count the same steps.
                tf.cond(is_update, lambda: self._spread(changed), lambda: self._spread(always_sent))

    def _spread(self, variables: Iterable) -> tf.Tensor:
        """Give all ranks the values that the owners of variables have now; return True."""
        inner = list(map(compat.inner_variable, variables))
        if inner:
            owners = [self._owners[id(variable)] for variable in inner]
            spread_from_owners(self._world, inner, owners)
        return tf.constant(True)

    def clip_by_global_norm(self, gradients: Sequence) -> list:
        """Clip the gradients that this rank owns by the norm of those of all ranks."""
        owned = iter(gradients)
        sent = []
        for owner, dtype in self._counted:
            norm = tf.TensorSpec([], dtype)
            if owner == self._world.rank:
                norm = compat.squared_norm(self.optimizer, next(owned))
            sent.append(norm)
        owners = [owner for owner, _ in self._counted]
        norms = broadcast_from_owners(self._world.job, sent, owners, self._world.group)
        return compat.clipped_by_global_norm(self.optimizer, gradients, norms)

    def with_own_averages(self, method: Callable[[list], Any], variables: Sequence) -> None:
        """Call a method on the variables that this rank owns, with their moving averages; outside an update, send the
        values that it gives them.
        """
        # Keras 3 finds averages by their positions among those of all variables.
        if compat.of_keras_3(self.optimizer):
            variables = self._trained
        owned = []
        for index, variable in enumerate(variables):
            # tf-keras refuses variables that it doesn't know.
            if self.owner_of(variable) in (self._world.rank, None):
                owned.append(index)
        compat.with_averages(self.optimizer, variables, owned, method)
        # In an update, which sends all new values at its end, this sends nothing.
        if not self._slots.updating.is_on:
            self._spread(variables)

    def with_all_averages(self, method: Callable[[], Any]) -> None:
        """Call a method that changes the averages of all variables on each rank, or the variables by them."""
        send = self._send_before_averages
        if send is not None:
            self._send_before_averages = None
            send()
        method()

    def _lend_averages(self, averages: Sequence) -> Iterator[Any]:
        """Yield a variable for each average: on its owner the average itself, on the others one of the same value. What
        is done with it must be the same on all ranks.
        """
        try:
            for variable, average in zip(self._trained, averages):
                if average is None:
                    yield None
                    continue
                # One after the other: a rank may have no memory for all.
                owner = self._owners[_key(variable)]
                is_owned = owner == self._world.rank
                sent = tf.TensorSpec(average.shape, average.dtype)
                if is_owned:
                    sent = compat.inner_variable(average).read_value()
                [value] = broadcast_from_owners(self._world.job, [sent], [owner], self._world.group)
                if is_owned:
                    yield compat.inner_variable(average)
                else:
                    yield tf.Variable(value)
        finally:
            # What has changed slots on all ranks counts as an update.
            self._slots.count_update()


def _changes_in_each_step(variable: Any) -> bool:
    return variable.constraint is not None or compat.is_overwritten(variable)


def _operations() -> Sequence[tf.Operation]:
    """Return the operations of the graph that is built; none in eager mode."""
    if tf.executing_eagerly():
        return []
    operations: Sequence[tf.Operation] = tf.compat.v1.get_default_graph().get_operations()
    return operations


def _key(variable: Any) -> int:
    return id(compat.inner_variable(variable))
