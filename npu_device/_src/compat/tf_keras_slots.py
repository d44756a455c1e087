"""The slots of a tf-keras optimizer that one rank holds: TensorFlow's variables with a class of their own.

The object stays, since lists of the optimizer and of checkpoints refer to it. On the other ranks it gets a handle
without a value: what reads it past its methods, as TensorFlow's own functions may, raises FailedPreconditionError.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, UninitializedVariable

from npu_device._src.compat.keras import SHARE, in_checkpoint

_VALUE = "VARIABLE_VALUE"  # the key of a variable's tensor in checkpoints
_HAS_MEMORY = "_npu_has_memory"
_ELEMENT = "_npu_element"  # what fills the slot until it is assigned a value


def is_plain_variable(slot: Any) -> bool:
    """Return whether a slot can be left to one rank: a variable that no strategy and no session has made."""
    return isinstance(slot, BaseResourceVariable) and not slot._in_graph_mode


def has_memory(slot: Any) -> bool:
    return bool(vars(slot).get(_HAS_MEMORY, True))


def free_until_first_step(slot: Any, initial_value: Any) -> None:
    """Let a slot be one that another rank will hold. A value of equal elements has no memory; any other one, and what a
    checkpoint has given it, stays.
    """
    watch_reads(slot)
    element = _element_of(initial_value)
    is_restored = slot._update_uid >= 0
    if element is not None and not is_restored:
        vars(slot)[_ELEMENT] = element
        _free_memory(slot)


def _element_of(initial_value: Any) -> Any:
    """Return what fills an initial value; None if its elements differ, or each rank may begin with another value."""
    # tf-keras has zeros where it is given nothing.
    if initial_value is None:
        return 0
    # Averages begin with the weights of this rank, and need no memory of their own: TensorFlow copies what is assigned
    # only when an update changes it. A scalar may have been computed from weights.
    if not isinstance(initial_value, tf.Tensor) or not hasattr(initial_value, "numpy"):
        return None
    array = np.ascontiguousarray(initial_value.numpy())
    if array.size < 2:
        return None
    # Elements are compared as bytes, since NaN isn't equal to itself, and -0.0 is to 0.0.
    rows = array.reshape(-1, 1).view(np.uint8)
    if not np.array_equal(rows, np.broadcast_to(rows[0], rows.shape)):
        return None
    return array.reshape(-1)[0]


def watch_reads(slot: Any) -> None:
    slot.__class__ = _remote_class(slot.__class__)


def make_remote(slot: Any) -> None:
    watch_reads(slot)
    if has_memory(slot):
        _free_memory(slot)


def make_whole(slot: Any) -> None:
    """Give a slot back what it has had before the first step."""
    if not has_memory(slot):
        _allocate_memory(slot)
    # A slot that has been built whole has the class that TensorFlow has given it.
    slot.__class__ = getattr(slot, "_npu_plain_class", slot.__class__)
    del vars(slot)[SHARE]


def make_own(slot: Any) -> None:
    slot.__class__ = _own_class(slot.__class__)


def set_value(slot: Any, value: Any) -> None:
    """Assign a slot a value that doesn't come from the script of its owner."""
    BaseResourceVariable.assign(slot, value)


def in_order_of_slots(optimizer: Any, variables: Sequence) -> list | None:
    """Return variables in the order in which a built optimizer keeps slots for them; None if it is built for others."""
    positions = {}
    for variable in variables:
        # The optimizer itself keeps no more of a variable than its position.
        position = optimizer._index_dict.get(optimizer._var_key(variable))
        positions[position] = variable
    if set(positions) != set(optimizer._index_dict.values()):
        return None
    return [positions[position] for position in sorted(positions)]


def variables_held(optimizer: Any) -> list:
    """Return the variables that are attributes of an optimizer, or in its lists: tf-keras doesn't list all of them."""
    variables: list = []
    for attribute in vars(optimizer).values():
        candidates = [attribute]
        if isinstance(attribute, (list, tuple)):
            candidates = list(attribute)
        variables.extend(filter(_is_tensorflow_variable, candidates))
    return variables


def _is_tensorflow_variable(candidate: Any) -> bool:
    return isinstance(candidate, tf.Variable)


def half_squared_norm(gradient: Any) -> tf.Tensor:
    """Return what ``tf.linalg.global_norm`` adds up for a gradient, also for the rows of a sparse one."""
    return tf.nn.l2_loss(getattr(gradient, "values", gradient))


def clipped_by_norm(
    gradients: Sequence, largest: float, half_squared_norms: Sequence[tf.Tensor]
) -> list:
    """Return gradients clipped as ``tf.clip_by_global_norm`` does, bit by bit, given the norms of all ranks."""
    half_squared = tf.reduce_sum(tf.stack(half_squared_norms))
    norm = tf.sqrt(half_squared * tf.constant(2.0, half_squared.dtype))
    clipped = tf.clip_by_global_norm(list(gradients), largest, use_norm=norm)[0]
    return clipped


def empty(variable: Any) -> None:
    """Free the memory of a variable that functions which are traced already may keep: these fail, or return tensors of
    nine empty dimensions, as no operation of TensorFlow can make a variable uninitialized.
    """
    with tf.init_scope(), tf.device(variable.device):
        no_elements = tf.zeros([0] * 9, variable.dtype)
        tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=no_elements, validate_shape=False
        )


def _free_memory(slot: Any) -> None:
    empty(slot)
    with tf.init_scope(), tf.device(slot.device):
        holder = UninitializedVariable(trainable=False, shape=slot.shape, dtype=slot.dtype)
    _adopt_handle(slot, holder)
    vars(slot)[_HAS_MEMORY] = False


def _allocate_memory(slot: Any) -> None:
    with tf.init_scope(), tf.device(slot.device):
        holder = tf.Variable(_initial_value(slot), trainable=False)
    _adopt_handle(slot, holder)
    vars(slot)[_HAS_MEMORY] = True


def _initial_value(slot: Any) -> tf.Tensor:
    element = vars(slot).get(_ELEMENT, 0)
    return tf.fill(slot.shape, tf.constant(element, slot.dtype))


def _adopt_handle(slot: Any, holder: Any) -> None:
    # SavedModels look for the variable of a handle.
    handle = holder.handle
    handle._parent_trackable = weakref.ref(slot)
    slot._handle = handle


# A variable that is made in a function has a class of its own.


@functools.cache
def _own_class(variable_class: Any) -> Any:
    """Return the class of slots that only this rank holds; their ``SHARE`` learns when the script assigns them."""

    def noting(name: str) -> Callable[..., Any]:
        change = getattr(variable_class, name)

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            outcome = change(self, *args, **kwargs)
            getattr(self, SHARE).note_assigned()
            return outcome

        return changed

    changes = ("assign", "assign_add", "assign_sub", "_restore_from_tensors")
    return type("OwnVariable", (variable_class,), {name: noting(name) for name in changes})


@functools.cache
def _remote_class(variable_class: Any) -> Any:
    """Return the class of slots that another rank holds."""
    # A slot that was freed when it was built has it already.
    if hasattr(variable_class, "_npu_plain_class"):
        return variable_class

    class RemoteVariable(variable_class):
        """A slot that another rank holds. Until the first step, it has its initial value unless assigned another."""

        # All methods of TensorFlow's variables that return the value call ``_read_variable_op``.
        def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
            share = getattr(self, SHARE)
            if share.is_apart:
                return share.read(self)
            if has_memory(self):
                read = functools.partial(super()._read_variable_op, *args, **kwargs)
            else:
                read = functools.partial(_initial_value, self)
            return share.read_before_first_step(self, read)

        def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            share = getattr(self, SHARE)
            if not share.is_apart:
                if not has_memory(self):
                    _allocate_memory(self)
                return super().assign(value, *args, **kwargs)
            share.assign(self, value)
            return self

        def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
            new_value = self.read_value() + tf.cast(delta, self.dtype)
            return self.assign(new_value, *args, **kwargs)

        def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
            new_value = self.read_value() - tf.cast(delta, self.dtype)
            return self.assign(new_value, *args, **kwargs)

        def is_initialized(self, name: str | None = None) -> tf.Tensor:
            return tf.constant(True)

        def _serialize_to_tensors(self) -> dict[str, Any]:
            return {_VALUE: in_checkpoint(self, has_memory(self))}

        def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
            return self.assign(restored_tensors[_VALUE])

        def __repr__(self) -> str:
            return f"<tf.Variable {self.name!r} shape={self.shape} dtype={self.dtype.name}, held by another rank>"

    RemoteVariable._npu_plain_class = variable_class
    return RemoteVariable
