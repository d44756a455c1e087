"""The slots of an optimizer that one rank holds: TensorFlow's variables with a class of their own.

Those of Keras 3 hold such a variable, and pass on to it what reads and assigns them. The variable stays, since lists of
the optimizer and of checkpoints refer to it. On the other ranks it gets a handle without a value.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, UninitializedVariable

from npu_device._src.compat.keras import SHARE, inner_variable
from npu_device._src.compat.tensorflow import to_array
from npu_device._src.threads import ThreadSwitch

_VALUE = "VARIABLE_VALUE"  # the key of a variable's tensor in checkpoints
_HAS_MEMORY = "_npu_has_memory"
_ELEMENT = "_npu_element"  # what fills the slot until it is assigned a value

HELD_ELSEWHERE = object()
of_this_rank = ThreadSwitch()
"""Lets slots that other ranks hold be ``HELD_ELSEWHERE`` in what a thread reads for a checkpoint."""


def is_plain_variable(slot: Any) -> bool:
    """Return whether a slot can be left to one rank: a variable that no strategy and no session has made."""
    variable = inner_variable(slot)
    return isinstance(variable, BaseResourceVariable) and not variable._in_graph_mode


def mark(slot: Any, share: Any) -> None:
    """Let ``share`` tell of a slot which rank holds it, and what reading and assigning it does on the others."""
    vars(inner_variable(slot))[SHARE] = share


def has_memory(slot: Any) -> bool:
    """Return whether a variable has a value of its own on this rank."""
    return bool(getattr(inner_variable(slot), _HAS_MEMORY, True))


def free_until_first_step(slot: Any) -> None:
    """Free the memory of a watched slot that another rank will hold, if all its elements are equal: it has them until
    it is assigned a value. Any other value, and what a checkpoint has given it, stays.
    """
    variable = inner_variable(slot)
    # A checkpoint that has been read before may have been waiting for the variable. A scalar may have been computed
    # from weights, which may be others on each rank.
    if slot._update_uid >= 0 or variable.shape.num_elements() < 2:
        return
    with tf.init_scope():
        flat = to_array(variable.read_value()).reshape(-1)
    # Elements are compared as bytes, since NaN isn't equal to itself, and -0.0 is to 0.0.
    content = flat.view(np.uint8)
    if np.array_equal(content[flat.itemsize :], content[: -flat.itemsize]):
        vars(variable)[_ELEMENT] = flat[0]
        _free_memory(variable)


def watch_reads(slot: Any) -> None:
    """Let a slot that another rank will hold tell functions that read it before the first step."""
    variable = inner_variable(slot)
    variable.__class__ = _remote_class(variable.__class__)


def make_remote(slot: Any) -> None:
    """Free the memory of a slot; its share tells what reading it gives."""
    watch_reads(slot)
    if has_memory(slot):
        _free_memory(inner_variable(slot))


def make_whole(slot: Any) -> None:
    """Give a slot back what it has had before the first step."""
    variable = inner_variable(slot)
    if not has_memory(slot):
        _allocate_memory(variable)
    # A slot of this rank has the class that TensorFlow has given it.
    variable.__class__ = getattr(variable, "_npu_plain_class", variable.__class__)
    del vars(variable)[SHARE]


def make_own(slot: Any) -> None:
    """Let the share of a slot know when a script assigns it a value."""
    variable = inner_variable(slot)
    variable.__class__ = _own_class(variable.__class__)


def set_slot(slot: Any, value: Any) -> None:
    """Assign a slot of this rank a value that doesn't come from its script."""
    BaseResourceVariable.assign(inner_variable(slot), value)


def _empty(variable: Any) -> None:
    """Free the memory of a variable that functions which are traced already may keep: these fail, or return tensors of
    nine empty dimensions, as no operation of TensorFlow can make a variable uninitialized.
    """
    with tf.init_scope(), tf.device(variable.device):
        no_elements = tf.zeros([0] * 9, variable.dtype)
        tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=no_elements, validate_shape=False
        )


def _free_memory(variable: Any) -> None:
    _empty(variable)
    with tf.init_scope(), tf.device(variable.device):
        holder = UninitializedVariable(trainable=False, shape=variable.shape, dtype=variable.dtype)
    _adopt_handle(variable, holder)
    vars(variable)[_HAS_MEMORY] = False


def _allocate_memory(variable: Any) -> None:
    with tf.init_scope(), tf.device(variable.device):
        holder = tf.Variable(_initial_value(variable), trainable=False)
    _adopt_handle(variable, holder)
    vars(variable)[_HAS_MEMORY] = True


def _initial_value(variable: Any) -> tf.Tensor:
    element = tf.constant(vars(variable)[_ELEMENT], variable.dtype)
    return tf.fill(variable.shape, element)


def _adopt_handle(variable: Any, holder: Any) -> None:
    # SavedModels look for the variable of a handle.
    handle = holder.handle
    handle._parent_trackable = weakref.ref(variable)
    vars(variable)["_handle"] = handle


# A variable that is made in a function has a class of its own.


@functools.cache
def _own_class(variable_class: Any) -> Any:
    """Return the class of slots that only this rank holds; their share learns when the script assigns them."""

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

        @property
        def handle(self) -> Any:
            return vars(self)["_handle"]

        # Operations of eager mode would read a tensor here past the methods, and find no elements.
        @property
        def _handle(self) -> Any:
            return weakref.proxy(self.handle)

        # All methods of TensorFlow's variables that return the value call ``_read_variable_op``.
        def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
            share = getattr(self, SHARE)
            if share.is_apart:
                return share.read()
            if has_memory(self):
                read = functools.partial(super()._read_variable_op, *args, **kwargs)
            else:
                read = functools.partial(_initial_value, self)
            return share.read_before_first_step(read)

        def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            share = getattr(self, SHARE)
            if not share.is_apart:
                if not has_memory(self):
                    _allocate_memory(self)
                return super().assign(value, *args, **kwargs)
            share.assign(value)
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
            if of_this_rank.is_on and not has_memory(self):
                return {_VALUE: HELD_ELSEWHERE}
            return {_VALUE: tf.convert_to_tensor(self)}

        def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
            return self.assign(restored_tensors[_VALUE])

        def __repr__(self) -> str:
            return f"<tf.Variable {self.name!r} shape={self.shape} dtype={self.dtype.name}, held by another rank>"

    RemoteVariable._npu_plain_class = variable_class
    return RemoteVariable
