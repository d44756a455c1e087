"""``npu.distribute.broadcast``, also of a scope's variables; and updates of which each rank makes and sends a share."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import after, fetchable
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.reduction import all_finite, with_nan_unless
from npu_device._src.training.distribute.synchronized_layers import find_layers
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.watching.digests import checksum
from npu_device._src.training.watching.same_variables import assign_from_owners, assign_from_root
from npu_device._src.wording import counted
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")


@compat.do_not_convert
def broadcast(
    values: Any, root_rank: int = 0, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP
) -> Any:
    """Overwrite variables, in place, with the values of the root.

    Args:
        values: a variable, or a nested structure of variables (see ``tf.nest``): ``tf.Variable``, Keras 2 or Keras 3;
            the same number, shapes and dtypes on every rank. For an empty list, a warning says that nothing is sent.
        root_rank: the rank whose values are sent (default 0).
        fusion: 0 or 2; either way, many variables travel in few large transfers.
        fusion_id: any number, without effect.
        group: name of the group.

    Returns:
        In a graph for a session, the operation that does it; ``None`` otherwise.

    Raises:
        TypeError: something that isn't a variable (it has no ``assign``), or a dtype that can't be sent.
        ValueError: ``root_rank`` out of range, ``fusion`` neither 0 nor 2, unknown group; a layer of tf-keras among the
            values has different vocabularies on the ranks (vocabularies are compared, not sent).
        RuntimeError: another rank has failed or left; the environment names several ranks but the job can't be joined
            any more.

    Every rank has to make the call, eagerly or in a tf.function. On a single device nothing happens.

    >>> import tensorflow as tf
    >>> import npu_device as npu
    >>> weight = tf.Variable([1.0, 2.0])
    >>> npu.distribute.broadcast([weight], root_rank=0)  # a single device
    >>> weight.numpy().tolist()
    [1.0, 2.0]

    Source: Ascend TF Adapter 2.x, ``npu.distribute.broadcast``.
    """
    # Accepted for Ascend's sake: every broadcast is a transfer of its own.
    del fusion_id
    if fusion not in (0, 2):
        raise ValueError(f"fusion {fusion!r} is unknown to broadcast; expected 0 or 2")
    world = world_unless_child(group)
    if world is None:
        return fetchable([])
    variables = tf.nest.flatten(values)
    vocabularies = list(filter(compat.is_vocabulary, variables))
    if not variables:
        _log.warning(
            "rank %d: broadcast was given an empty list, so that every rank keeps the values it has.\nLikely cause: "
            "the model isn't built yet, and has no variables before its first call.\nWhat to do: call "
            "model.build(input_shape), or the model on one batch, before broadcast; or let "
            "npu.distribute.replicate(model) see to it.",
            world.job.cluster.rank,
        )
    find_layers(world)
    for position, variable in enumerate(variables):
        if not (hasattr(variable, "assign") or compat.is_vocabulary(variable)):
            raise TypeError(
                f"rank {world.job.cluster.rank}: broadcast overwrites variables in place, and number {position} of "
                f"the {len(variables)} values is of type {type(variable).__name__}, which can't be assigned to. Pass "
                "variables, for instance model.trainable_variables."
            )
    if vocabularies and tf.executing_eagerly():
        layers = map(compat.layer_of_vocabulary, vocabularies)
        # A table can't be assigned to, so it is compared.
        require_same_state(world, [layer for layer in layers if layer is not None])
    sent = [variable for variable in variables if not compat.is_vocabulary(variable)]
    return assign_from_root(world, sent, int(root_rank))


def npu_broadcast_scope_wrapper(strategy: Any) -> Any:
    """Make a ``tf.distribute`` strategy broadcast the trainable variables that are made in its scope.

    Args:
        strategy: the strategy; its ``scope`` is replaced on this object.

    Returns:
        The same object. At the end of the first ``with strategy.scope():`` in which trainable variables are made they
        are overwritten with those of rank 0; later ones are not sent. On a single device nothing is sent.

    Raises:
        RuntimeError: when the scope ends: another rank has failed or left.

    Every rank has to leave the scope. Source: Ascend TF Adapter 2.x, ``npu_broadcast_scope_wrapper``.
    """
    plain_scope = strategy.scope
    is_sent = False

    @contextlib.contextmanager
    def scope() -> Iterator:
        nonlocal is_sent
        variables = []

        def collect(next_creator: Any, **keywords: Any) -> Any:
            variable = next_creator(**keywords)
            if variable.trainable:
                variables.append(variable)
            return variable

        with plain_scope() as entered:
            with tf.variable_creator_scope(collect):
                yield entered
            # Later scopes may belong to one rank alone.
            if variables and not is_sent:
                is_sent = True
                broadcast(variables)

    strategy.scope = scope
    return strategy


def require_no_strategy(model: Any) -> None:
    """Refuse a Keras model that was made under a strategy of ``tf.distribute`` other than ``OneDeviceStrategy``."""
    strategy = model.distribute_strategy
    is_single = isinstance(strategy, tf.distribute.OneDeviceStrategy)
    if compat.is_default_strategy(strategy) or is_single:
        return
    raise ValueError(
        f"the model {model.name!r} was made under {type(strategy).__name__}, which copies variables to the devices of "
        "one process and divides its batches itself. npu.distribute.replicate does that over the ranks, and takes a "
        "model of one device.\nWhat to do: make and compile the model outside strategy.scope(), or with "
        "tf.distribute.get_strategy() as the strategy (in the model garden: --distribution_strategy=off)."
    )


# Collection of a session's graph: the optimizer state for the share of this rank, which the other ranks don't have.
VARIABLES_OF_ONE_RANK = "npu_device/variables_of_one_rank"


@compat.do_not_convert
def grouping_gradients_apply(
    apply_func: Callable, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    """Apply the share of this rank in the gradients, then give every rank all variables.

    Args:
        apply_func: called with the (gradient, variable) pairs of this rank; ``apply_gradients`` of an optimizer for
            instance.
        grads_and_vars: all pairs, the same on every rank, with gradients that have been reduced already.
        args: passed on to ``apply_func``.
        kwargs: passed on to ``apply_func``.

    Returns:
        On several ranks ``None``, or in a graph for a session the operation that does it all; in a tf.function the
        updates run with the function. On a single device the result of ``apply_func`` for all pairs.

    Raises:
        ValueError: there are fewer variables than ranks; or ``apply_func`` is that of a ``LossScaleOptimizer`` whose
            inner optimizer clips by ``global_clipnorm``.
        RuntimeError: as for ``broadcast``.

    The variables are cut into one contiguous share per rank, of about the same number of bytes, and each rank keeps
    only its share of the state of the optimizer. Every rank has to make the call.

    Source: Ascend TF Adapter 2.x, ``npu.distribute.grouping_gradients_apply``.
    """
    world = world_unless_child()
    if world is None:
        return apply_func(grads_and_vars, *args, **kwargs)
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    own_share = shares(variables, world.size)[world.rank]
    # Counted before the call, since what the call adds belongs to this rank.
    count = len(tf.compat.v1.global_variables())
    # The function may be a bound method, which knows its optimizer.
    optimizer: Any = getattr(apply_func, "__self__", None)
    own_pairs = [pairs[position] for position in own_share]
    if hasattr(optimizer, "inner_optimizer"):
        if getattr(optimizer.inner_optimizer, "global_clipnorm", None):
            raise ValueError(
                f"rank {world.rank}: the {type(optimizer.inner_optimizer).__name__} in this {type(optimizer).__name__} "
                "clips by global_clipnorm, for which it needs all gradients; grouping_gradients_apply gives each "
                "rank's only those of its share, so that the ranks would differ.\nWhat to do: clip the reduced "
                "gradients by tf.clip_by_global_norm first, with an optimizer that doesn't clip."
            )
        # Every rank decides alike whether it makes a step.
        are_finite = all_finite([gradient for gradient, _ in pairs])
        own_gradients = with_nan_unless(are_finite, [gradient for gradient, _ in own_pairs])
        own_pairs = list(zip(own_gradients, [variable for _, variable in own_pairs]))
    with compat.clipped_with_all(optimizer, pairs, own_share):
        applied = apply_func(own_pairs, *args, **kwargs)
    # Only a session's graph has such variables.
    for variable in tf.compat.v1.global_variables()[count:]:
        tf.compat.v1.add_to_collection(VARIABLES_OF_ONE_RANK, variable)
    with after(applied):
        return grouping_broadcast(variables)


@compat.do_not_convert
def grouping_broadcast(variables: Any) -> Any:
    """Overwrite each variable with the value of the rank whose share it is in.

    Args:
        variables: variables of the same number, shapes and dtypes on every rank.

    Returns:
        On several ranks ``None``, and in a graph for a session the operation that does it; ``variables`` on a single
        device.

    Raises:
        ValueError: there are fewer variables than ranks.
        RuntimeError: as for ``broadcast``.

    Source: Ascend TF Adapter 2.x, ``npu.distribute.grouping_broadcast``.
    """
    world = world_unless_child()
    if world is None:
        return variables
    variables = list(variables)
    owners = []
    for owner, share in enumerate(shares(variables, world.size)):
        owners += [owner] * len(share)
    return assign_from_owners(world, variables, owners)


def shares(variables: Sequence, count: int) -> list[range]:
    """Cut a list of variables into ``count`` runs of neighbours of about the same number of bytes, none empty."""
    if len(variables) < count:
        raise ValueError(
            f"the update of {len(variables)} variable(s) can't be divided among {count} ranks; expected at least one "
            "variable per rank.\n"
            "What to do: apply the gradients on every rank with the optimizer itself."
        )
    weights = []
    for variable in variables:
        shape = tf.TensorShape(variable.shape)
        size = 0
        # Scalars weigh nothing, as on Ascend, and neither does what has no known size.
        if shape.rank:
            size = tf.as_dtype(variable.dtype).size * (shape.num_elements() or 0)
        weights.append(size)
    ends = list(itertools.accumulate(weights))
    # Half of a variable decides, so that a run ends where it is nearest to its goal.
    middles = [end - weight / 2 for end, weight in zip(ends, weights)]
    start = 0
    runs = []
    for run in range(1, count + 1):
        nearest = bisect.bisect_right(middles, ends[-1] * run / count)
        # Each later run needs a variable, too.
        end = min(max(start + 1, nearest), len(variables) - count + run)
        runs.append(range(start, end))
        start = end
    return runs


# Layers hold more than variables, which is compared, not sent: tables, what they adapted to, constant tensors.

# The attribute that only ``adapt`` reads: samples that differ may well give the same result.
_WHILE_ADAPTING = "summary"

# What to call an attribute in a message, and its checksum, by its name.
State = dict[str, tuple[str, int]]


_OF_TABLES = ("lookup", "key_dtype", "value_dtype", "resource_handle")


def require_same_state(world: World, layers: Sequence, constants: bool = True) -> None:
    """Compare what the same layers hold on all ranks; ``constants``: tensors also of those that don't adapt to data."""
    own_states = [(layer.name, state_of(layer, constants)) for layer in layers]
    answers = world.objects(own_states, "what layers hold outside variables")
    if any(len(answer) != len(own_states) for answer in answers):
        # The ranks have different models, which the comparison of their variables reports.
        return
    for position, (name, state) in enumerate(own_states):
        states: list[State] = [answer[position][1] for answer in answers]
        for attribute in state:
            held = [rank_state.get(attribute, ("nothing", 0)) for rank_state in states]
            if held.count(held[0]) < len(held):
                # The first attribute that differs is enough to find the layer.
                lines = world.lines(
                    f"{text}, checksum {state_digest:08x}" for text, state_digest in held
                )
                raise ValueError(
                    f"the layer {name!r} holds different values of {attribute!r} on the ranks:\n{lines}\n"
                    "Likely cause: the layer adapted to data that were already divided among the ranks, or its "
                    "values are computed at random without a seed.\nWhat to do: call adapt on the same data on every "
                    "rank, before they are divided; for random values, call npu.open(seed=1) right after the imports."
                )


def state_of(layer: Any, constants: bool = True) -> State:
    """Return what a layer holds outside variables; see ``require_same_state``."""
    state = {}
    if hasattr(layer, "get_vocabulary"):
        # Keras returns a copy, which is counted and digested.
        words = list(layer.get_vocabulary())
        state["vocabulary"] = counted(len(words), "word"), zlib.crc32(repr(words).encode())
    adapts = hasattr(layer, "adapt")
    # Sorted, because ranks may have set attributes in another order.
    for name, value in sorted(vars(layer).items()):
        if all(hasattr(value, attribute) for attribute in _OF_TABLES):
            # The tables of a vocabulary also have counts of what the layer has adapted to.
            if "vocabulary" not in state:
                state[name] = _table_state(value)
        elif (constants or adapts) and name != _WHILE_ADAPTING:
            array = _array(value, lists=adapts)
            if array is not None:
                state[name] = f"{array.dtype} {list(array.shape)}", checksum(array)
    return state


def _table_state(table: Any) -> tuple[str, int]:
    try:
        keys, values = tf.raw_ops.LookupTableExportV2(
            table_handle=table.resource_handle, Tkeys=table.key_dtype, Tvalues=table.value_dtype
        )
    except (tf.errors.OpError, ValueError):
        # A table can't be read before it is initialized, or if it is of a graph.
        return "a table", 0
    keys = map(repr, keys.numpy().tolist())
    # Sorted, since tables have no order.
    pairs = sorted(zip(keys, map(repr, values.numpy().tolist())))
    return f"a table with {counted(len(pairs), 'key')}", zlib.crc32(repr(pairs).encode())


def _array(value: Any, lists: bool) -> np.ndarray | None:
    """Return the values of a constant, which may be a list if ``lists`` is True; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, tf.Tensor):
        if tf.is_symbolic_tensor(value) or value.dtype in (tf.resource, tf.variant):
            return None
        return compat.to_array(value)
    if not lists or not isinstance(value, list):
        return None
    # Lists of anything else, such as layers, are no constants.
    if not all(isinstance(entry, (float, np.floating, str)) for entry in value):
        return None
    return np.asarray(value)
