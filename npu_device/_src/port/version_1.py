"""Sessions in TensorFlow 1 style, and scripts that are distributed already: with ``tf.distribute``, and Horovod."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from npu_device._src.port.port import DONE, NOTE, OPEN, WORDS, Port, dotted, keyword, method, walk
from npu_device._src.port.version_2 import EACH, SHARE, SUM, is_slice, noise, scaling

_HOOKS = "from npu_bridge.estimator.npu.npu_hook import "
_BATCH, _NUMBER, _UNKNOWN = "batch", "number", "unknown"


def sessions(port: Port, is_v1: bool) -> None:
    """Port what a script trains in sessions."""
    gone = [node for name, node in port.imported if name.startswith(WORDS["gone from TensorFlow"])]
    gone += [node for node in port.of(cst.Attribute) if port.name(node) in WORDS["gone from TensorFlow"]]
    if gone:
        port.found(OPEN, "gone from TensorFlow", gone[0])
    opened = [call for call in port.calls if port.name(call.func) in WORDS["sessions"]]
    optimizers = [call for call in port.calls if re.fullmatch(r"tensorflow\.train\.\w+Optimizer", port.name(call.func))]
    if not opened or not optimizers:
        return
    plain = [node for name, node in port.imported if name == "tensorflow" and isinstance(node, cst.Import)]
    is_old = plain and not any(".compat.v1" in port.text(call.func) for call in opened)
    if is_old and not is_v1:
        port.found(OPEN, "TensorFlow 1", opened[0])
    for node in plain if is_old and is_v1 else ():
        name = next(local for local, whole in port.aliases.items() if whole == "tensorflow")
        new = "tensorflow.compat.v1 as tensorflow" if name == "tensorflow" else "tensorflow.compat.v1"
        port.replace(node, port.text(node).replace("tensorflow", new, 1))
        port.insert(port.statement(node), f"{name}.disable_v2_behavior()", after=True)
        port.found(DONE, "TensorFlow 1", node, "imports tensorflow.compat.v1, as -c asks for")
    port.imports.append("from npu_bridge.npu_init import NPUDistributedOptimizer")
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
        noise(port, call)
        if scaling(port, keyword(call, "loss", 0)) in (SUM, EACH):
            port.found(OPEN, "sum or mean", call)
    trains = {port.text(port.target(port.statement(step))) for step in steps} - {""}
    for call in (each for each in port.calls if method(each) == "run" and each.args):
        if port.maker(call.args[0].value).endswith(WORDS["initializes"]):
            port.imports.append(f"{_HOOKS}broadcast_global_variables")
            port.insert(port.statement(call), f"{port.text(call.func)}(broadcast_global_variables(0))", after=True)
            port.found(DONE, "session: broadcast", call)
        elif any(isinstance(each, cst.Name) and each.value in trains for each in walk(call)):
            _feed(port, call)


def _hook(port: Port, call: Any) -> None:
    hook, hooks, folder = "NPUBroadcastGlobalVariablesHook(0)", keyword(call, "hooks"), keyword(call, "checkpoint_dir")
    port.imports.append(f"{_HOOKS}NPUBroadcastGlobalVariablesHook")
    if hooks is None and not call.args:
        port.replace(call, f"{dotted(call.func)}(hooks=[{hook}])")
    else:
        port.replace(*((call.args[-1], f"{{}}, hooks=[{hook}]") if hooks is None else (hooks, f"[{hook}, *{{}}]")))
    if folder is not None:
        port.replace(folder, "{} if npu.distribute.is_main() else None")
    port.found(DONE, "session: hook", call)


def _feed(port: Port, call: Any) -> None:
    """Divide what the training step of a session is fed with."""
    given = keyword(call, "feed_dict", 1)
    given = next(iter(port.origins(given)), given) if given is not None and dotted(given) else given
    values = [each.value for each in given.elements] if isinstance(given, cst.Dict) else []
    kinds = [_fed(port, value, call) for value in values]
    if _BATCH not in kinds or _UNKNOWN in kinds:
        port.found(OPEN, "no dataset", call)
        return
    for value in (each for each, kind in zip(values, kinds) if kind == _BATCH):
        port.replace(value, "{}" + SHARE)
    port.found(DONE, "share of an array", call)


def _fed(port: Port, value: Any, call: Any) -> str:
    """Return what a value is that a session is fed with: a batch of samples, which the loop makes, or a number."""
    numbers = (cst.Integer, cst.Float, cst.BinaryOperation, cst.UnaryOperation)
    made = port.assigned(value) if dotted(value) else None
    if made is None:
        is_number = isinstance(value, numbers) or port.text(value) in ("True", "False")
        return _NUMBER if is_number else _BATCH if is_slice(value) else _UNKNOWN
    around = [each for each in port.up(call) if isinstance(each, (cst.For, cst.While))]
    if any(each in around for each in port.up(made.statement)) and not isinstance(made.statement, cst.For):
        return _BATCH
    return _NUMBER if isinstance(made.value, numbers) else _UNKNOWN  # also one sample after the other


def strategies(port: Port) -> None:
    """Port what a script does with a strategy of ``tf.distribute``."""
    for call in port.calls:
        name = port.name(call.func)
        is_made = name.startswith("tensorflow.distribute.") and name.endswith("Strategy")
        is_reduce = method(call) == "reduce" and len(call.args) > 1 and "strategy" in port.text(call.func.value).lower()
        if is_made and "TPU" in name:
            port.found(NOTE, "TPU", call)
        elif is_made and "ParameterServer" not in name and ".distribute." in dotted(call.func):
            port.replace(call, f"{dotted(call.func).split('.distribute.')[0]}.distribute.get_strategy()")
            port.found(DONE, "strategy", call)
        elif is_reduce and port.text(keyword(call, "axis", 2)) in ("", "None"):
            how = "mean" if "mean" in port.text(call.args[0]).lower() else "sum"
            port.replace(call, f'npu.distribute.all_reduce({port.text(call.args[1].value)}, reduction="{how}")')
            port.found(DONE, "strategy.reduce", call)
        elif is_made or is_reduce or (method(call) in WORDS["only of a strategy"] and uses_strategy(port)):
            port.found(OPEN, "strategy's own", call)
    for node in (each for each in port.of(cst.Attribute) if each.attr.value == "num_replicas_in_sync"):
        port.replace(node, "npu.distribute.size()")
        port.found(DONE, "replicas", node)
    for node in (each for each in port.of(cst.Assign) if "TF_CONFIG" in port.text(each.targets[0].target)):
        port.found(OPEN, "TF_CONFIG", node)


def uses_strategy(port: Port) -> bool:
    """Return True if a script names ``tf.distribute``."""
    return any(port.name(node).startswith("tensorflow.distribute") for node in port.of(cst.Attribute))


def horovod(port: Port) -> bool:
    """Change the imports of Horovod in a script; False if there are none."""
    nodes = [(name, node) for name, node in port.imported if name.split(".")[0] == "horovod"]
    for name, node in nodes:
        is_plain = isinstance(node, cst.Import) and not node.names[0].asname
        if name != "horovod" and (is_plain or not name.startswith(WORDS["faces of Horovod"])):
            port.found(OPEN, "horovod's others", node)
        else:
            face = port.text(node).replace("horovod", "npu_device.horovod", 1)
            port.replace(node, "from npu_device import horovod" if is_plain else face)
            port.found(DONE, "horovod", node)
    return bool(nodes)
