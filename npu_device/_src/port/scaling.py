"""How a loss scales with the batch, read from the code that computes it: then it is known how to reduce gradients."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any

import libcst as cst

from npu_device._src.port.nodes import argument, bounded, dotted, last_word, method
from npu_device._src.port.port import Port
from npu_device._src.port.rules import WORDS_BY_TOPIC

_OPERATORS = {
    "add": cst.Add,
    "subtract": cst.Subtract,
    "multiply": cst.Multiply,
    "scalar_mul": cst.Multiply,
    **dict.fromkeys(("div", "divide", "divide_no_nan", "div_no_nan", "truediv"), cst.Divide),
}
_NUMBER = re.compile(
    r"(batch_?size|num_\w+|\w*(weight|alpha|beta|lambda|gamma|coef|scale|factor|_size|losses))$",
    re.I,
)
_DEVICES = re.compile(
    r"((replica|[gt]pu|device|worker|tower|process(es)?)s?(_(count|num|number|in_sync|per_\w+))?|world_size)$",
    re.I,
)
_LENGTH_OF_BATCH = re.compile(r"shape(\(\w+\))?\[0\]$")


class Scale(enum.Enum):
    """How a loss, or a value in it, depends on the samples of a batch."""

    MEAN = enum.auto()  # averages over the samples
    SUM = enum.auto()  # adds up the samples
    EACH = enum.auto()  # one value per sample
    SHARED = enum.auto()  # the same on all ranks, whatever the samples
    COUNT = enum.auto()  # the number of samples of the rank
    REPLICAS = enum.auto()  # a number of which the number of ranks is a factor
    # The same for a number that may be the number of ranks, and what it changes.
    DEVICES = enum.auto()
    UNKNOWN = enum.auto()


def counts_replicas(port: Port, node: Any) -> bool:
    """Return True if a number of replicas or devices stands in an expression, but for the loss of a gradient."""
    if method(node) == "gradient":
        return False
    is_name = isinstance(node, (cst.Name, cst.Attribute))
    if is_name and scaling(port, node) in (Scale.REPLICAS, Scale.DEVICES):
        return True
    return any(counts_replicas(port, child) for child in node.children)


_NUMBERS = (Scale.MEAN, Scale.SUM, Scale.REPLICAS, Scale.DEVICES)
"""What is a single number, whatever the samples are."""


@bounded(Scale.UNKNOWN)
def scaling(port: Port, node: Any) -> Scale:
    """Return how an expression for a loss scales, by what it is computed from."""
    if node is None:
        return Scale.UNKNOWN
    # A number such as 0.5 is the same everywhere.
    if isinstance(node, (cst.Integer, cst.Float)):
        return Scale.SHARED
    # A sign, as in -x, changes nothing.
    if isinstance(node, cst.UnaryOperation):
        return scaling(port, node.expression)
    # An operation such as a * b combines both sides.
    if isinstance(node, cst.BinaryOperation):
        left_scale = scaling(port, node.left)
        right_scale = scaling(port, node.right)
        return _combined(node.operator, left_scale, right_scale)
    # An element, such as tf.shape(x)[0], may be the number of samples.
    if isinstance(node, cst.Subscript) and _LENGTH_OF_BATCH.search(port.text(node)):
        return Scale.COUNT
    if isinstance(node, cst.Call):
        return _of_call(port, node)
    return _of_name(port, node)


def _of_name(port: Port, node: Any) -> Scale:
    if isinstance(node, cst.Attribute) and node.attr.value == "num_replicas_in_sync":
        return Scale.REPLICAS
    scale = _of_all(port, port.origins(node))
    # A number such as num_gpus = len(gpus) may be another one on the ranks.
    if scale is not Scale.REPLICAS and _DEVICES.search(last_word(dotted(node))):
        return Scale.DEVICES
    if scale is Scale.COUNT and _is_size_of_all_data(port, node):
        return Scale.SHARED
    if scale is Scale.UNKNOWN and _NUMBER.match(last_word(dotted(node))):
        # Only the name tells: config.batch_size, or an argument alpha.
        return Scale.SHARED
    return scale


def _of_all(port: Port, origins: Iterable) -> Scale:
    """Return the scale of several values that one expression may have; UNKNOWN if they differ."""
    scales = {scaling(port, origin) for origin in origins}
    if Scale.DEVICES in scales:
        return Scale.DEVICES
    if len(scales) != 1:
        return Scale.UNKNOWN
    return scales.pop()


def _is_size_of_all_data(port: Port, node: Any) -> bool:
    """Return True for len(…) that is computed once, at the top of the script: not of a batch."""
    assignment = port.assigned(node)
    if assignment is None or assignment.statement not in port.module.body:
        return False
    return "shape(" not in port.text(assignment.value)


def _of_call(port: Port, call: Any) -> Scale:
    word = port.called_word(call)
    operand = None
    if call.args:
        operand = call.args[0].value
    if word in ("reduce_mean", "reduce_sum"):
        return _of_reduction(port, call, word, operand)
    if word == "compute_average_loss":
        # The call divides by the global batch size if it is told that: then the ranks' losses add up.
        if argument(call, "global_batch_size", 2) is None:
            return Scale.MEAN
        return Scale.SUM
    if word in WORDS_BY_TOPIC["the same on all ranks"]:
        return Scale.SHARED
    if word in ("shape", "size", "len"):
        if operand is not None and counts_replicas(port, operand):
            return Scale.DEVICES
        return Scale.COUNT
    if word in WORDS_BY_TOPIC["keeps the scale of a loss"]:
        return scaling(port, operand)
    return _of_function(port, call, word, operand)


def _of_reduction(port: Port, call: Any, word: str, operand: Any) -> Scale:
    inner = scaling(port, operand)
    if inner in (*_NUMBERS, Scale.SHARED):
        # A reduction of a single number changes nothing.
        return inner
    axis = argument(call, "axis", 1) or argument(call, "reduction_indices")
    if axis is not None and "0" not in port.text(axis):
        # The samples, which are axis 0, stay.
        return Scale.EACH
    if word == "reduce_mean":
        return Scale.MEAN
    return Scale.SUM


def _of_function(port: Port, call: Any, word: str, operand: Any) -> Scale:
    name = port.name(call.func)
    if name.startswith("tensorflow.") and word in _OPERATORS and len(call.args) > 1:
        left_scale = scaling(port, operand)
        right_scale = scaling(port, call.args[1].value)
        return _combined(_OPERATORS[word](), left_scale, right_scale)
    if name.startswith("keras.losses.") and ".v1" in port.text(call.func):
        # The functions of tf.compat.v1.losses reduce by themselves.
        return Scale.MEAN
    if name.startswith(("keras.", "tensorflow.", "numpy.")):
        return _of_samples(port, word, operand)
    if word in ("compiled_loss", "compute_loss") and not port.callees(call):
        # Keras's own method of the model, whose result is a mean.
        return Scale.MEAN
    if port.maker(call.func).startswith("keras.losses."):
        return _of_loss_object(port, call)
    return _of_all(port, port.origins(call))


def _of_samples(port: Port, word: str, operand: Any) -> Scale:
    """Return the scale of a function of a library, most of which work on each sample."""
    scale = scaling(port, operand)
    if scale in (Scale.REPLICAS, Scale.DEVICES):
        return Scale.DEVICES
    # The root of a mean, or the largest sample, is neither the sum nor the mean of the ranks' values.
    if scale in _NUMBERS or word.startswith("reduce_"):
        return Scale.UNKNOWN
    return Scale.EACH


def _of_loss_object(port: Port, call: Any) -> Scale:
    """Return the scale of ``criterion(y, x)``, by the reduction with which the object was made."""
    text = port.text(argument(port.meant(call.func), "reduction"))
    # The last word is enough: of tf.keras.losses.Reduction.SUM it is SUM.
    reduction = last_word(text.lower().strip("\"'"))
    return {"none": Scale.EACH, "sum": Scale.SUM}.get(reduction, Scale.MEAN)


def _combined(operator: Any, left_scale: Scale, right_scale: Scale) -> Scale:
    if {left_scale, right_scale} & {Scale.REPLICAS, Scale.DEVICES}:
        return _with_devices(operator, left_scale, right_scale)
    if isinstance(operator, (cst.Divide, cst.FloorDivide)):
        return _divided(left_scale, right_scale)
    if isinstance(operator, (cst.Multiply, cst.Power)):
        return _multiplied(left_scale, right_scale)
    return _added(left_scale, right_scale)


def _with_devices(operator: Any, left_scale: Scale, right_scale: Scale) -> Scale:
    """Return the scale of an operation with a number of replicas or devices."""
    # A sum stays one, whatever it is divided by; the mean of a replica becomes its part of the mean of all.
    adds_up = left_scale is Scale.SUM or (left_scale, right_scale) == (Scale.MEAN, Scale.REPLICAS)
    if adds_up and isinstance(operator, cst.Divide):
        return Scale.SUM
    is_product = isinstance(operator, cst.Multiply)
    if is_product and {left_scale, right_scale} == {Scale.REPLICAS, Scale.SHARED}:
        return Scale.REPLICAS
    return Scale.DEVICES


def _divided(dividend: Scale, divisor: Scale) -> Scale:
    if divisor is Scale.COUNT and dividend is Scale.SUM:
        return Scale.MEAN
    if divisor is Scale.SHARED:
        return dividend
    if dividend is Scale.EACH and divisor is Scale.EACH:
        return Scale.EACH
    # A quotient of two sums, for instance, isn't the sum or mean of the ranks' quotients.
    return Scale.UNKNOWN


def _multiplied(left_scale: Scale, right_scale: Scale) -> Scale:
    if left_scale is Scale.SHARED:
        return right_scale
    if right_scale is Scale.SHARED:
        return left_scale
    if Scale.EACH in (left_scale, right_scale):
        return Scale.EACH
    return Scale.UNKNOWN


def _added(left_scale: Scale, right_scale: Scale) -> Scale:
    """Return the scale of a sum or a difference."""
    if left_scale is right_scale:
        return left_scale
    scales = {left_scale, right_scale}
    if scales == {Scale.MEAN, Scale.SHARED}:
        # A regularization term may be added to a mean: its mean over the ranks is itself.
        return Scale.MEAN
    if Scale.EACH in scales and Scale.SUM not in scales:
        return Scale.EACH
    # A sum over the samples with another term, for instance, would get that term from each rank.
    return Scale.UNKNOWN
