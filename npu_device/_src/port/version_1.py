"""Sessions in TensorFlow 1 style: a distributed optimizer, a broadcast, and the rank's share of what is fed."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from npu_device._src.port.port import DONE, OPEN, WORDS, Port
from npu_device._src.port.scaling import EACH, SUM, scaling
from npu_device._src.port.script import dotted, keyword, method, target_of, walk
from npu_device._src.port.version_2 import SHARE, is_slice

_SESSIONS = ("tensorflow.Session", "tensorflow.InteractiveSession", "tensorflow.train.MonitoredTrainingSession")
_OPTIMIZER = re.compile(r"tensorflow\.train\.\w+Optimizer")
_INITIALIZERS = ("global_variables_initializer", "initialize_all_variables")
_OURS = "from npu_bridge.npu_init import NPUDistributedOptimizer"
_HOOKS = "from npu_bridge.estimator.npu.npu_hook import "
_BATCH, _NUMBER, _UNKNOWN = "batch", "number", "unknown"


def sessions(port: Port, is_v1: bool) -> None:
    """Port what a script trains in sessions."""
    gone = [node for name, node in port.imported if name.startswith(WORDS["gone from TensorFlow"])]
    gone += [node for node in port.of(cst.Attribute) if port.name(node) in WORDS["gone from TensorFlow"]]
    if gone:
        port.found(OPEN, "gone from TensorFlow", gone[0])
    opened = [call for call in port.calls if port.name(call.func) in _SESSIONS]
    optimizers = [call for call in port.calls if _OPTIMIZER.fullmatch(port.name(call.func))]
    if not opened or not optimizers:
        return
    _version_1(port, opened, is_v1)
    port.imports.append(_OURS)
    off = [call for call in port.calls if method(call).startswith("disable_")]  # then seeds are those of the graph
    tensorflow = [node for name, node in port.imported if name.startswith("tensorflow")]
    port.after += [port.statement(each) for each in [*tensorflow, *off]]
    for call in optimizers:
        port.replace(call, "NPUDistributedOptimizer({})")
        port.found(DONE, "session: optimizer", call)
    for call in (each for each in opened if port.name(each.func).endswith("MonitoredTrainingSession")):
        _hook(port, call)
    steps = [call for call in port.calls if method(call) in ("minimize", "compute_gradients")]
    for call in steps:
        if scaling(port, keyword(call, "loss", 0)) in (SUM, EACH):
            port.found(OPEN, "sum or mean", call)
    trains = {port.text(target_of(port.statement(step))) for step in steps} - {""}
    for call in (each for each in port.calls if method(each) == "run" and each.args):
        if port.maker(call.args[0].value).endswith(_INITIALIZERS):
            port.imports.append(f"{_HOOKS}broadcast_global_variables")
            port.insert(port.statement(call), f"{port.text(call.func)}(broadcast_global_variables(0))", after=True)
            port.found(DONE, "session: broadcast", call)
        elif any(isinstance(each, cst.Name) and each.value in trains for each in walk(call)):
            _feed(port, call)


def _version_1(port: Port, opened: list[Any], is_v1: bool) -> None:
    """Import ``tensorflow.compat.v1`` where a script takes its names from ``tensorflow``."""
    plain = [node for name, node in port.imported if name == "tensorflow" and isinstance(node, cst.Import)]
    if not plain or any(".compat.v1" in port.text(call.func) for call in opened):
        return
    if not is_v1:
        port.found(OPEN, "TensorFlow 1", opened[0])
        return
    for node in plain:
        port.replace(node, port.text(node).replace("tensorflow", "tensorflow.compat.v1", 1))
        port.insert(port.statement(node), f"{dotted(node.names[0].asname.name)}.disable_v2_behavior()", after=True)
        port.found(DONE, "TensorFlow 1", node, "imports tensorflow.compat.v1, as -c asks for")


def _hook(port: Port, call: Any) -> None:
    hook, hooks, folder = "NPUBroadcastGlobalVariablesHook(0)", keyword(call, "hooks"), keyword(call, "checkpoint_dir")
    port.imports.append(f"{_HOOKS}NPUBroadcastGlobalVariablesHook")
    if hooks is not None:
        port.replace(hooks, f"[{hook}, *{{}}]")
    elif call.args:
        port.replace(call.args[-1], f"{{}}, hooks=[{hook}]")
    else:
        port.replace(call, f"{dotted(call.func)}(hooks=[{hook}])")
    if folder is not None:
        port.replace(folder, "{} if npu.distribute.is_main() else None")
    port.found(DONE, "session: hook", call)


def _feed(port: Port, call: Any) -> None:
    """Divide what a session's training step is fed with."""
    given = keyword(call, "feed_dict", 1)
    given = next(iter(port.origins(given)), given) if given is not None and dotted(given) else given
    values = [each.value for each in given.elements] if isinstance(given, cst.Dict) else []
    kinds = [_fed(port, value, call) for value in values]
    if _BATCH not in kinds or _UNKNOWN in kinds:
        port.found(OPEN, "no data set", call)
        return
    for value, kind in zip(values, kinds):
        if kind == _BATCH:
            port.replace(value, "{}" + SHARE)
    port.found(DONE, "share of an array", call)


def _fed(port: Port, value: Any, call: Any) -> str:
    """Return what a value is that a session is fed with: a batch of samples, which the loop makes, or a number."""
    numbers = (cst.Integer, cst.Float, cst.BinaryOperation, cst.UnaryOperation)
    made = port.assigned(value) if dotted(value) else None
    if made is None:
        is_number = isinstance(value, numbers) or port.text(value) in ("True", "False")
        return _NUMBER if is_number else _BATCH if is_slice(value) else _UNKNOWN
    if isinstance(made.statement, cst.For):  # one sample after the other
        return _UNKNOWN
    around = [each for each in port.up(call) if isinstance(each, (cst.For, cst.While))]
    if any(each in around for each in port.up(made.statement)):
        return _BATCH
    return _NUMBER if isinstance(made.value, numbers) else _UNKNOWN
