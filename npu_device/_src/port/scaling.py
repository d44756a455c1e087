"""How a loss is scaled: does it average over the samples of a batch, or add them up?"""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from npu_device._src.port.port import WORDS, Port
from npu_device._src.port.script import dotted, keyword

MEAN, SUM, EACH, SHARED, COUNT, UNKNOWN = "mean", "sum", "each", "shared", "count", "unknown"
"""Over the samples; one value per sample; the same on all ranks whatever the samples; the rank's number of samples."""

_PAIRS = {"add": cst.Add, "subtract": cst.Subtract, "multiply": cst.Multiply, "divide": cst.Divide}
_NUMBER = re.compile(r"(batch_?size|num_\w+|\w*(weight|alpha|beta|lambda|gamma|coef|scale|factor|_size|losses))$", re.I)


def scaling(port: Port, node: Any, depth: int = 0) -> str:
    """Return the kind of a loss."""
    if depth > 20 or node is None:
        return UNKNOWN
    if isinstance(node, (cst.Integer, cst.Float)):
        return SHARED
    if isinstance(node, cst.UnaryOperation):
        return scaling(port, node.expression, depth + 1)
    if isinstance(node, cst.BinaryOperation):
        return _pair(node.operator, scaling(port, node.left, depth + 1), scaling(port, node.right, depth + 1))
    if isinstance(node, cst.Subscript):
        return COUNT if re.search(r"shape(\(\w+\))?\[0\]$", port.text(node)) else UNKNOWN
    if isinstance(node, cst.Call):
        return _called(port, node, depth)
    kinds = {scaling(port, each, depth + 1) for each in port.origins(node)}
    made = port.assigned(node) if dotted(node) else None
    if kinds == {COUNT} and made and made.statement in port.module.body and "shape(" not in port.text(made.value):
        return SHARED  # the size of all data, not of a batch
    if len(kinds) != 1 or kinds == {UNKNOWN}:
        return SHARED if _NUMBER.match(dotted(node).rpartition(".")[2]) else UNKNOWN
    return kinds.pop()


def _pair(operator: Any, one: str, two: str) -> str:
    if isinstance(operator, (cst.Divide, cst.FloorDivide)):
        if two == COUNT:
            return MEAN if one == SUM else UNKNOWN
        return one if two == SHARED else EACH if one == EACH == two else UNKNOWN
    if isinstance(operator, (cst.Multiply, cst.Power)):
        return two if one == SHARED else one if two == SHARED else EACH if EACH in (one, two) else UNKNOWN
    if one == two or (MEAN in (one, two) and SHARED in (one, two)):
        return MEAN if MEAN in (one, two) else one
    return EACH if EACH in (one, two) and SUM not in (one, two) else UNKNOWN


def _called(port: Port, call: Any, depth: int) -> str:
    name = port.name(call.func)
    last = port.last(call)
    first = call.args[0].value if call.args else None
    if last in ("reduce_mean", "reduce_sum"):
        inner, axis = scaling(port, first, depth + 1), keyword(call, "axis", 1) or keyword(call, "reduction_indices")
        if inner in (MEAN, SUM, SHARED):
            return inner  # of a single number
        if axis is not None and "0" not in port.text(axis):
            return EACH
        return MEAN if last == "reduce_mean" else SUM
    if last == "compute_average_loss":
        return MEAN if keyword(call, "global_batch_size", 2) is None else SUM
    if last in ("shape", "size", "len") or last in WORDS["the same on all ranks"]:
        return SHARED if last in WORDS["the same on all ranks"] else COUNT
    if last in WORDS["keeps the scale of a loss"]:
        return scaling(port, first, depth + 1)
    if name.startswith("tensorflow.") and last in _PAIRS and len(call.args) > 1:
        return _pair(_PAIRS[last](), scaling(port, first, depth + 1), scaling(port, call.args[1].value, depth + 1))
    if name.startswith("keras.losses."):
        return MEAN if ".v1" in port.text(call.func) else EACH
    if name.startswith(("tensorflow.", "numpy.", "keras.")):
        return EACH
    if last in ("compiled_loss", "compute_loss") and not port.callees(call):
        return MEAN
    if port.maker(call.func).startswith("keras.losses."):
        [maker] = [call.func] if isinstance(call.func, cst.Call) else port.origins(call.func)
        said = port.text(keyword(maker, "reduction")).lower().strip("\"'").rpartition(".")[2]
        return {"none": EACH, "sum": SUM}.get(said, MEAN)
    kinds = {scaling(port, each, depth + 1) for each in port.origins(call)}
    return kinds.pop() if len(kinds) == 1 else UNKNOWN
