"""Checks that the ranks hold the same variables: before the first step, and after a training.

In between ``replica_audit`` does, and at the end of the job ``last_word``. In sessions ``session_steps`` does.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.graph import fetchable
from npu_device._src.collectives.ops import broadcast_from_owners
from npu_device._src.gradients.reduction import dense_of
from npu_device._src.training.watching import digests
from npu_device._src.training.watching.digests import differences, digest_of, variable_name
from npu_device._src.training.watching.last_word import ENDED_APART, LastWord
from npu_device._src.training.watching.partial_sums import to_be_equal
from npu_device._src.training.watching.schedule import can_compare
from npu_device._src.training.watching.session_ends import SessionEnds
from npu_device._src.world.world import World, value_of

_log = logging.getLogger("npu_device")
_TAPE = "gradient_tape/"  # prefix of the name of the operation that a gradient is of


def make_equal(
    world: World, variables: Sequence, keeps_order: bool = True, level: int = logging.WARNING
) -> bool:
    """Compare variables before the first step; where they differ, overwrite them with the values of the first rank.

    Return False while they have no values: they were made in the trace that goes on. Usually TensorFlow then gives them
    values and traces again, when the caller can compare them.
    """
    mode = environment.NPU_DEVICE_UNEQUAL_START.get()
    if mode == "ignore" or not can_compare():
        return True
    # The ranks compare now, also if a function is being traced.
    with tf.init_scope():
        are_set = world.objects(all(map(_has_value, variables)), "which variables have values")
        unset_ranks = [rank for rank, is_set in zip(world.group.ranks, are_set) if not is_set]
        if len(unset_ranks) == world.size:
            return False
        if unset_ranks:
            raise RuntimeError(
                f"rank {world.job.cluster.rank}: at the first step the variables of the model or the optimizer "
                f"have no values yet on rank(s) {', '.join(map(str, unset_ranks))}, but on the others they have.\n"
                "Likely cause: the model is built, or a checkpoint is read, on some ranks only.\n"
                "What to do: build the whole model on every rank, and call npu.distribute.broadcast(model.variables) "
                "before the first step; read the checkpoint on every rank."
            )
        variables = to_be_equal(world, variables)
        # Sorted by name: variables of one name belong together, if all ranks have the same names.
        if not keeps_order:
            names = sorted(map(variable_name, variables))
            answers = world.objects(names, "names of variables")
            is_unique = len(set(names)) == len(names)
            if is_unique and all(rank_names == names for rank_names in answers):
                variables = sorted(variables, key=variable_name)
        positions, differing = _differences(world, variables)
        if positions:
            text = digests.DIFFERENT_START % (differing, digests.BROADCAST)
            if mode == "error":
                raise RuntimeError(f"rank {world.job.cluster.rank}: {text}")
            assign_from_root(world, [variables[position] for position in positions])
            if world.rank == 0:
                _log.log(level, "%s\nThey are those of rank %d now.", text, world.group.ranks[0])
        note_equal(world, variables)
        return True


def assign_from_root(world: World, variables: Sequence, root_rank: int = 0) -> Any:
    """Set variables to the values of the root; return the operation in a graph for a session, else None. What only one
    rank holds gets what the root has assigned to it, if that has.
    """
    shares = list(map(compat.share_of, filter(compat.is_apart, variables)))
    variables = [variable for variable in variables if not compat.is_apart(variable)]
    variables = to_be_equal(world, variables)
    sent = world.from_root([value_of(variable) for variable in variables], root_rank)
    if tf.executing_eagerly():
        # Settled: the root has made the call, and before it has given the owners what it has assigned.
        for share in shares:
            share.settle(world.group.ranks[root_rank])
    note_equal(world, variables)
    assignments = [variable.assign(tensor) for variable, tensor in zip(variables, sent)]
    return fetchable(assignments)


def assign_from_owners(world: World, variables: Sequence, owners: Sequence[int]) -> Any:
    """Set each variable to the value of the rank of the group that owns it; return as ``assign_from_root``."""
    outcomes = spread_from_owners(world, variables, owners)
    note_equal(world, variables)
    return fetchable(outcomes)


def spread_from_owners(world: World, variables: Sequence, owners: Sequence[int]) -> list:
    """Do as ``assign_from_owners``, without noting that they are equal; return what a session has to run."""
    tensors = []
    for variable, owner in zip(variables, owners):
        # An owner has its own values already.
        if owner == world.rank:
            tensors.append(value_of(variable))
        else:
            # The dtype of a reference variable of TensorFlow 1 isn't that of its value.
            tensors.append(tf.TensorSpec(variable.shape, tf.as_dtype(variable.dtype).base_dtype))
    sent = broadcast_from_owners(world.job, tensors, owners, world.group)
    assignments = []
    for variable, tensor, owner in zip(variables, sent, owners):
        if owner != world.rank:
            assignments.append(variable.assign(tensor))
    return [*assignments, *sent[:1]]


def note_equal(world: World, variables: Sequence) -> None:
    """Let variables that are equal now be compared at the end of the job, or of a session, if all of its ranks are
    here.
    """
    if world.size != world.job.cluster.world_size:
        return
    held_by_all = [variable for variable in variables if not compat.is_share(variable)]
    last_word: LastWord | SessionEnds | None = world.job.component(LastWord)
    # Variables of a session have no values outside of it.
    if not tf.compat.v1.executing_eagerly_outside_functions():
        last_word = world.job.component(SessionEnds)
    if last_word is not None:
        last_word.add(held_by_all)


class ComparedVariables(set[int]):
    """The ids of variables that ``make_equal`` has compared for one purpose, as long as they exist."""

    def note(self, variables: Iterable) -> None:
        for variable in variables:
            self.add(id(variable))
            # A variable that goes takes its note along, since another one may get its id.
            weakref.finalize(variable, self.discard, id(variable))

    def others(self, variables: Sequence) -> list:
        """Return the variables that haven't been compared. In most steps, there are none."""
        if self.issuperset(map(id, variables)):
            return []
        return [variable for variable in variables if id(variable) not in self]


compared_behind = ComparedVariables()  # by ``make_equal_behind``


def make_equal_behind(
    world: World, gradients: Sequence, level: int = logging.WARNING
) -> list | None:
    """Do as ``make_equal`` does with the variables of gradients that a ``tf.function`` reduces itself.

    Return the variables, none if they aren't known; None if the values aren't gradients of a tape in this graph. The
    graph knows which trainable variables it has read. Those of one shape and dtype are compared, once, if there are as
    many of them as gradients; otherwise some may belong to this rank alone.
    """
    symbolic = list(filter(tf.is_symbolic_tensor, map(dense_of, gradients)))
    if not any(tensor.op.name.startswith(_TAPE) for tensor in symbolic):
        return None
    # The names of the operations from which the gradients are computed, and of the operations that they are gradients
    # of. Anything else is left out: one rank may read it alone, to look at it.
    sources = compat.tensors_behind(symbolic, lambda tensor: tensor.dtype == tf.resource)
    names = {tensor.op.name for tensor in sources}
    needed = set(names)
    for name in names:
        if name.startswith(_TAPE):
            forward, _, _ = name[len(_TAPE) :].rpartition("/")
            needed.add(forward)

    def is_needed(handle: Any) -> bool:
        # A gradient may name the operation that uses the value, and not the read.
        readers = handle.consumers()
        operations = list(readers)
        for reader in readers:
            for tensor in reader.outputs:
                operations += tensor.consumers()
        return any(operation.name in needed for operation in operations)

    trained = []
    for variable, handle in compat.variables_read():
        if variable.trainable and is_needed(handle):
            trained.append(variable)
    variables = as_many_as_gradients(gradients, trained)
    new = compared_behind.others(variables)
    if new and make_equal(world, new, keeps_order=False, level=level):
        compared_behind.note(new)
    return variables


def as_many_as_gradients(gradients: Sequence, variables: Sequence) -> list:
    """Return the variables of each shape and dtype of which there are as many variables as gradients."""
    of_gradients = Counter(
        _shape_and_dtype(gradient) for gradient in gradients if gradient is not None
    )
    of_variables = Counter(map(_shape_and_dtype, variables))
    # A signature is in both with the same number.
    equal_signatures = dict(of_variables.items() & of_gradients.items())
    return [variable for variable in variables if _shape_and_dtype(variable) in equal_signatures]


def _shape_and_dtype(tensor: Any) -> tuple[str, tf.DType]:
    return str(tensor.shape), tf.as_dtype(tensor.dtype).base_dtype


def warn_if_different(world: World, variables: Sequence) -> None:
    """Compare variables after a training; rank 0 warns with the names of those that differ."""
    _, differing = _differences(world, variables)
    if differing and world.rank == 0:
        _log.warning(ENDED_APART, differing)


def _differences(world: World, variables: Sequence) -> tuple[list[int], str]:
    """Return the positions of the variables that differ, and a text about them; "" if none do."""
    try:
        own_digests = [digest_of(variable) for variable in variables]
    except (tf.errors.OpError, NotImplementedError):
        own_digests = []
    answers = world.objects(own_digests, "digests of variables")
    signatures = [[digest[:2] for digest in row] for row in answers]
    if any(signature != signatures[0] for signature in signatures):
        # The reduction itself names the shapes that differ.
        return [], ""
    checksums = [[digest for _, _, digest in row] for row in answers]
    names = list(map(variable_name, variables))
    return differences(world.job.cluster, world.group.ranks, names, checksums)


def _has_value(variable: Any) -> bool:
    """Return False for a variable without a value: reading it fails, or returns an empty tensor (TensorFlow 2.20)."""
    try:
        return bool(variable.shape.is_compatible_with(tf.convert_to_tensor(variable).shape))
    except tf.errors.OpError:
        return False
