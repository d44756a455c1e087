"""Arguments that many calls of Horovod share: their descriptions, and those that have no effect here."""

from __future__ import annotations

import inspect
from typing import Any

# ``gradient_predivide_factor`` only moves a part of the division of a mean. ``num_groups`` and
# ``groups`` have no effect, because the split strategy decides what is reduced together.
_IGNORED = (
    "name device device_dense device_sparse ignore_name_scope inplace session process_set "
    "gradient_predivide_factor use_locking num_groups groups scale_local_gradients"
)
_NO_EFFECT = frozenset(_IGNORED.split())
_DESCRIPTIONS = {
    "tensor": "a tensor, variable, array, number or ``tf.IndexedSlices`` of the same shape and dtype on every rank; in "
    "gathers and alltoall, the first dimension may differ.",
    "tensors": "a list of them.",
    "value": "a tensor, array or number.",
    "variables": "the variables, in the same order on every rank.",
    "obj": "anything that can be pickled.",
    "root_rank": "the rank that sends.",
    "average": "older spelling of ``op``.",
    "op": "``Average`` (default), ``Sum``, and to reduce all of a dense tensor ``Min``, ``Max`` or ``Product``.",
    "compression": "what travels: ``Compression.none`` (default), ``Compression.fp16`` or the like.",
    "factors": "``prescale_factor`` and ``postscale_factor``, which multiply the tensors before, and the results.",
    "splits": "number of rows for each rank; default: the same number for each.",
    "arguments": "as in Horovod; those that name anything, or its device, have no effect.",
    "rest": "what the call takes after the tensor.",
    "name": "ignored.",
    "device": "ignored.",
    "process_set_id": "0, that of all ranks.",
}
_RAISES = """
Raises:
    tf.errors.FailedPreconditionError: the calls of the ranks don't fit each other.
    tf.errors.InvalidArgumentError, ValueError: a shape that can't be divided among the ranks; a wrong argument.
    NotImplementedError: process sets, Adasum, and what else the text names.
    RuntimeError: another rank has failed or left, or the job can't be joined any more."""


def described(call: Any) -> Any:
    """Add what calls share, arguments and errors, to the docstring of a function or class."""
    text = inspect.cleandoc(call.__doc__)
    names = inspect.signature(call).parameters
    shared = [f"    {name}: {_DESCRIPTIONS[name]}" for name in names if name in _DESCRIPTIONS]
    lines = [text]
    if "\nArgs:" not in text:
        lines += ["", "Args:"]
    # The text is set on the object, so that ``help()`` shows it.
    call.__doc__ = "\n".join([*lines, *shared, _RAISES])
    return call


def with_effect(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that aren't names, devices and the like; raise NotImplementedError for a process set."""
    if arguments.get("process_set") is not None:
        raise NotImplementedError(
            "process sets aren't supported.\nWhat to do: leave process_set out, or make a group with "
            "hccl.manage.api.create_group and call npu.distribute.all_reduce(..., group=...)."
        )
    return {name: argument for name, argument in arguments.items() if name not in _NO_EFFECT}
