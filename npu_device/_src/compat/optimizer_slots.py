"""The variables that an optimizer keeps for each variable that it trains, of which a rank may hold only some."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.compat.keras import (
    belongs_to_keras,
    is_keras_3,
    is_overwritten,
    is_share,
    keras_of,
    of_keras_3,
    with_inner,
)
from npu_device._src.compat.slot_memory import is_plain_variable

_STATE_IN_SLOTS = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax Nadam Lion Ftrl Lamb"
"""Keras's optimizers that update each variable by itself, and keep all they know of it in slots."""

_OWN_METHODS = {"__init__", "build", "update_step", "get_config", "from_config"}
"""What a script's class may override so that each variable is still updated by itself."""


_NO_SLOTS = ("_trainable_variables", "_variables", "_accumulated_gradients")
ACCUMULATOR = "gradient_accumulator"
"""The name that Keras gives to what it adds up the gradients of a variable in, which each rank does by itself."""

AVERAGE = "average"
"""The name that Keras gives to the moving average of a variable."""

_AVERAGES = "_model_variables_moving_average"

UPDATE_AVERAGES = "_update_model_variables_moving_average"
OVERWRITE_WITH_AVERAGES = "_overwrite_model_variables_with_average_value"
"""The methods that keep moving averages of variables, and that give these to the variables."""


def why_not_alone(optimizer: Any) -> str:
    """Return why an optimizer doesn't update each variable by itself, as far as its class tells; "" if it does."""
    keras = keras_of(optimizer)
    is_tf_keras = not is_keras_3(keras)
    if is_tf_keras and not isinstance(optimizer, keras.optimizers.Optimizer):
        return "it is a legacy optimizer of tf-keras"
    if is_tf_keras and isinstance(optimizer, keras.optimizers.Nadam):
        # In a function, tf-keras multiplies the product once more at the update of each variable: a rank would have to
        # do that for the variables of the others, too, in the same order.
        return (
            "the momenta of tf-keras's Nadam depend on the number of variables that a rank updates"
        )
    script_class = type(optimizer)
    base = next((cls for cls in script_class.__mro__ if belongs_to_keras(cls)), None)
    if base is None or base.__name__ not in _STATE_IN_SLOTS.split():
        name = (base or script_class).__name__
        return f"{name} may keep state of a variable elsewhere than in its slots"
    keras_optimizer = keras.optimizers.Optimizer
    for cls in script_class.__mro__[: script_class.__mro__.index(base)]:
        names = {name for name in vars(cls) if hasattr(keras_optimizer, name)}
        plain = _OWN_METHODS | {name for name in names if name.startswith("__")}
        if changed := sorted(names - plain):
            return f"{cls.__name__} overrides {', '.join(changed)}"
    return ""


def is_optimizer_built(optimizer: Any) -> bool:
    """Return whether an optimizer, or a loss-scale optimizer and the one inside, has its variables."""
    if of_keras_3(optimizer):
        return bool(optimizer.built)
    return bool(getattr(with_inner(optimizer)[-1], "_built", False))


def averages_of(optimizer: Any) -> list:
    """Return the moving averages of the variables that a built optimizer trains; None for one without."""
    return list(getattr(optimizer, _AVERAGES, None) or ())


def undivided_state(optimizer: Any, whole_slots: Sequence) -> list:
    """Return the variables of an optimizer that are neither shares nor what every update of Keras's classes needs.

    Args:
        whole_slots: slots that each rank holds.
    """
    needed = [
        optimizer._iterations,
        optimizer._learning_rate,
        getattr(optimizer, "_u_product", None),
        # tf-keras keeps the value of a schedule.
        getattr(optimizer, "_current_learning_rate", None),
        *(getattr(optimizer, "_accumulated_gradients", None) or ()),
        *whole_slots,
    ]
    needed_ids = set(map(id, needed))
    state = list(optimizer.variables)
    if not of_keras_3(optimizer):
        # tf-keras lists not all variables that are attributes of an optimizer, or in its lists.
        state = []
        for attribute in vars(optimizer).values():
            candidates = [attribute]
            if isinstance(attribute, (list, tuple)):
                candidates = list(attribute)
            state += [held for held in candidates if isinstance(held, tf.Variable)]
    undivided = []
    for variable in state:
        if id(variable) not in needed_ids and not is_share(variable):
            undivided.append(variable)
    return undivided


def lists_of_slots(optimizer: Any, trained: Sequence) -> Iterator[Sequence]:
    """Yield the lists in which a built optimizer keeps its slots, in the order of the variables that it trains."""
    for name, held in vars(optimizer).items():
        # The lists that a class of the script keeps are slots, whatever their names.
        if name in _NO_SLOTS or not isinstance(held, (list, tuple)):
            continue
        if len(held) != len(trained):
            continue
        pairs = zip(held, trained)
        if all(slot is None or _is_slot(slot, variable) for slot, variable in pairs):
            yield held


def _is_slot(slot: Any, variable: Any) -> bool:
    return is_plain_variable(slot) and tuple(slot.shape) == tuple(variable.shape)


def update_without_gradients(optimizer: Any) -> None:
    """Do what an update does besides changing variables, their slots and the count: Keras does nothing at all."""
    if not of_keras_3(optimizer):
        # All ranks add up the norms together.
        optimizer._clip_gradients([])
        return
    with keras_of(optimizer).name_scope(optimizer.name, caller=optimizer):
        optimizer._backend_apply_gradients([], [])


def count_update(optimizer: Any) -> Any:
    """Count an update, and return what ``apply_gradients`` returns."""
    if not of_keras_3(optimizer):
        # tf-keras computes the rate of a schedule in each step.
        optimizer._compute_current_learning_rate()
    optimizer._iterations.assign_add(1)
    return optimizer._iterations


def clips_by_global_norm(optimizer: Any) -> bool:
    """Return whether an optimizer clips gradients by their global norm; it doesn't if it clips each by itself."""
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        return False
    return bool(optimizer.global_clipnorm and optimizer.global_clipnorm > 0)


def squared_norm(optimizer: Any, gradient: Any) -> tf.Tensor:
    """Return the sum of the squares of a gradient, as the global norm of Keras adds them up; in tf-keras half of it."""
    keras = keras_of(optimizer)
    if not is_keras_3(keras):
        # What ``tf.linalg.global_norm`` adds up, also for the rows of a sparse gradient.
        return tf.nn.l2_loss(getattr(gradient, "values", gradient))
    operations = keras.ops
    return operations.sum(operations.square(gradient))


def clipped_by_global_norm(
    optimizer: Any, gradients: Sequence, squared_norms: Sequence[tf.Tensor]
) -> list:
    """Return gradients clipped as Keras does, bit by bit, given the squared norms of all ranks' gradients."""
    keras = keras_of(optimizer)
    largest = optimizer.global_clipnorm
    if not is_keras_3(keras):
        half_squared = tf.reduce_sum(tf.stack(squared_norms))
        norm = tf.sqrt(half_squared * tf.constant(2.0, half_squared.dtype))
        return tf.clip_by_global_norm(list(gradients), largest, use_norm=norm)[0]
    operations = keras.ops
    norm = operations.sqrt(operations.sum(operations.stack(squared_norms)))
    scale = largest * operations.minimum(1.0 / norm, 1.0 / largest)
    # An infinite norm makes this NaN, and the scale with it.
    scale = scale + (norm - norm)
    return [gradient * scale for gradient in gradients]


@contextlib.contextmanager
def clipped_with_all(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], share: Sequence[int]
) -> Iterator[None]:
    """Let an optimizer that is given some of the pairs of gradients and variables in the block clip those by the global
    norm of all gradients. ``share``: the positions of those that it is given.
    """
    if not getattr(optimizer, "global_clipnorm", None) or hasattr(optimizer, "inner_optimizer"):
        yield
        return
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            f"this {type(optimizer).__name__} adds up gradients, and clips the sums by global_clipnorm, for which it "
            "needs all of them; it is given only those of the share of its rank.\nWhat to do: clip the reduced "
            "gradients by tf.clip_by_global_norm first, with an optimizer that doesn't clip."
        )
    # The positions of the gradients that Keras clips: first it drops what is None or overwrites its variable.
    positions = []
    for position, (gradient, variable) in enumerate(pairs):
        if gradient is not None and not is_overwritten(variable):
            positions.append(position)
    name = "_clip_gradients"
    clipping = [pairs[position][0] for position in positions]
    if scale := getattr(optimizer, "loss_scale_factor", None):
        clipping = [gradient / scale for gradient in clipping]
    # A legacy optimizer clips pairs.
    if hasattr(optimizer, "_global_clipnorm_fn"):
        name = "_global_clipnorm_fn"
        clipping = [pairs[position] for position in positions]
    clip = getattr(optimizer, name)
    was_set = name in vars(optimizer)

    def clip_with_all(_: Any) -> list:
        clipped = zip(clip(clipping), positions)
        return [gradient for gradient, position in clipped if position in share]

    # The optimizer's own ``__setattr__`` is bypassed, since it tracks what is to be saved.
    vars(optimizer)[name] = clip_with_all
    try:
        yield
    finally:
        if was_set:
            vars(optimizer)[name] = clip
        else:
            del vars(optimizer)[name]


def with_averages(
    optimizer: Any, trained: Sequence, indices: Sequence[int], method: Callable[[list], Any]
) -> Any:
    """Call a method of an optimizer with some of the variables that it trains, given by their positions."""
    chosen = [trained[index] for index in indices]
    # tf-keras looks up the average of each variable, so that no other averages are in the way.
    if not of_keras_3(optimizer):
        return method(chosen)
    averages = getattr(optimizer, _AVERAGES)
    # While the method runs, the optimizer has the averages of the chosen variables only. Keras's own ``__setattr__`` is
    # bypassed, since it tracks what is to be saved.
    vars(optimizer)[_AVERAGES] = [averages[index] for index in indices]
    try:
        return method(chosen)
    finally:
        vars(optimizer)[_AVERAGES] = averages


class _Averages(list):
    """The moving averages of an optimizer, of which Keras's callback gets others to swap."""

    def __init__(self, averages: Sequence, lend: Callable[[Sequence], Iterator]) -> None:
        super().__init__(averages)
        self._lend = lend

    def __iter__(self) -> Iterator:
        frame = sys._getframe(1)
        callback = frame.f_locals.get("self")
        if isinstance(callback, tf.keras.callbacks.SwapEMAWeights):
            return self._lend(self[:])
        return super().__iter__()

    def __deepcopy__(self, memo: dict[int, Any]) -> list:
        # The copy of an optimizer isn't divided.
        return copy.deepcopy(list(self), memo)


def lend_averages(optimizer: Any, lend: Callable[[Sequence], Iterator]) -> None:
    """Let Keras's callback ``SwapEMAWeights`` read and change what a function yields for the averages of an optimizer:
    it works on TensorFlow's variables, and is the same on all ranks. Any other caller sees the averages as they are.
    """
    has_callback = hasattr(keras_of(optimizer).callbacks, "SwapEMAWeights")
    if optimizer.use_ema and has_callback:
        averages = _Averages(getattr(optimizer, _AVERAGES), lend)
        # Keras's own ``__setattr__`` is bypassed, since it tracks what is to be saved.
        vars(optimizer)[_AVERAGES] = averages


def path_of(slot: Any) -> str:
    """Return the name by which messages call a slot."""
    return str(getattr(slot, "path", slot.name))


def trained_in_order(optimizer: Any, variables: Sequence) -> list | None:
    """Return the variables for which an optimizer is built, in the order of its slots. tf-keras doesn't keep them: it
    may be one of the given ones only, or the answer is None.
    """
    if of_keras_3(optimizer):
        return list(optimizer._trainable_variables)
    # The optimizer itself keeps no more of a variable than its position.
    positions = optimizer._index_dict
    trained = {positions.get(optimizer._var_key(variable)): variable for variable in variables}
    if set(trained) != set(positions.values()):
        return None
    return [trained[position] for position in sorted(trained)]
