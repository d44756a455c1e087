"""Scripts that are distributed already: ``tf.distribute``, where each rank gets the default strategy, and Horovod."""

from __future__ import annotations

import libcst as cst

from npu_device._src.port.port import DONE, NOTE, OPEN, WORDS, Port
from npu_device._src.port.script import dotted, keyword, method

_FACES = ("horovod.tensorflow", "horovod.keras")


def strategies(port: Port) -> None:
    """Port what a script does with a strategy of ``tf.distribute``."""
    for call in port.calls:
        name = port.name(call.func)
        if name.startswith("tensorflow.distribute.") and name.endswith("Strategy"):
            if "TPU" in name:
                port.found(NOTE, "TPU", call)
            elif "ParameterServer" in name or ".distribute." not in dotted(call.func):
                port.found(OPEN, "strategy's own", call)
            else:
                port.replace(call, f"{dotted(call.func).split('.distribute.')[0]}.distribute.get_strategy()")
                port.found(DONE, "strategy", call)
        elif method(call) == "reduce" and len(call.args) > 1 and "strategy" in port.text(call.func.value).lower():
            if port.text(keyword(call, "axis", 2)) not in ("", "None"):
                port.found(OPEN, "strategy's own", call)
                continue
            how = "mean" if "mean" in port.text(call.args[0]).lower() else "sum"
            port.replace(call, f'npu.distribute.all_reduce({port.text(call.args[1].value)}, reduction="{how}")')
            port.found(DONE, "strategy.reduce", call)
        elif method(call) in WORDS["only of a strategy"] and uses_strategy(port):
            port.found(OPEN, "strategy's own", call)
    for node in port.of(cst.Attribute):
        if node.attr.value == "num_replicas_in_sync":
            port.replace(node, "npu.distribute.size()")
            port.found(DONE, "replicas", node)
    for node in port.of(cst.Assign):
        if "TF_CONFIG" in port.text(node.targets[0].target):
            port.found(OPEN, "TF_CONFIG", node)


def uses_strategy(port: Port) -> bool:
    """Return True if a script names ``tf.distribute``."""
    return any(port.name(node).startswith("tensorflow.distribute") for node in port.of(cst.Attribute))


def horovod(port: Port) -> bool:
    """Change a script's imports of Horovod; False if there are none."""
    nodes = [(name, node) for name, node in port.imported if name.split(".")[0] == "horovod"]
    for name, node in nodes:
        is_plain = isinstance(node, cst.Import) and not node.names[0].asname
        if name != "horovod" and (is_plain or not name.startswith(_FACES)):
            port.found(OPEN, "horovod's others", node)
            continue
        face = port.text(node).replace("horovod", "npu_device.horovod", 1)
        port.replace(node, "from npu_device import horovod" if is_plain else face)
        port.found(DONE, "horovod", node)
    return bool(nodes)
