"""Sessions in TensorFlow 1 style, and scripts that are distributed already: with ``tf.distribute``, and Horovod."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import libcst as cst
from libcst import matchers

from npu_device._src.port.nodes import argument, dotted, follow, last_word, method
from npu_device._src.port.port import DONE, NOTE, OPEN, Port
from npu_device._src.port.rules import WORDS_BY_TOPIC
from npu_device._src.port.scaling import Scale, scaling
from npu_device._src.port.session_feeds import divide_feed
from npu_device._src.port.version_2 import ask_about_noise, training_steps

_HOOKS = "from npu_bridge.estimator.npu.npu_hook import "


def port_sessions(port: Port, is_v1: bool) -> None:
    """Port what a script trains in sessions."""
    _ask_about_what_is_gone(port)
    opened = []
    optimizers = []
    for call in port.calls:
        name = port.name(call.func)
        if name in WORDS_BY_TOPIC["sessions"]:
            opened.append(call)
        elif re.fullmatch(r"tensorflow\.train\.\w+Optimizer", name):
            optimizers.append(call)
    # Without both, nothing trains in a session.
    if not opened or not optimizers:
        return
    _import_version_1(port, opened, is_v1)
    port.imports.append("from npu_bridge.npu_init import NPUDistributedOptimizer")
    # The job opens after what switches version 2 off, so that its seed becomes the graph's.
    switches = [call for call in port.calls if method(call).startswith("disable_")]
    imports = [node for name, node in port.imported if name.startswith("tensorflow")]
    port.opened_after += [port.statement(node) for node in [*imports, *switches]]
    for call in optimizers:
        port.replace(call, "NPUDistributedOptimizer({})")
        port.report(DONE, "session: optimizer", call)
    names = WORDS_BY_TOPIC["layers of TensorFlow 1"]
    layers = [call for call in port.calls if port.name(call.func).startswith(names)]
    if layers:
        port.report(NOTE, "layers of TensorFlow 1", layers[0])
    for call in opened:
        if port.name(call.func).endswith("MonitoredTrainingSession"):
            _add_hook(port, call)
    _port_steps(port)


def _ask_about_what_is_gone(port: Port) -> None:
    names = WORDS_BY_TOPIC["gone from TensorFlow"]
    gone = [node for name, node in port.imported if name.startswith(names)]
    gone += [node for node in port.of(cst.Attribute) if port.name(node) in names]
    if gone:
        port.report(OPEN, "gone from TensorFlow", gone[0])


def _import_version_1(port: Port, opened: list, is_v1: bool) -> None:
    """Import ``tensorflow.compat.v1`` in a script for TensorFlow 1, if that is asked for; else ask."""
    named = [node for name, node in port.imported if name == "tensorflow"]
    plain = [node for node in named if isinstance(node, cst.Import)]
    if not plain or any(".compat.v1" in port.text(call.func) for call in opened):
        return
    if not is_v1:
        port.report(OPEN, "TensorFlow 1", opened[0])
        return
    # Only a plain import may be replaced: import tensorflow as tf
    for node in plain:
        aliases = [alias for alias in node.names if dotted(alias.name) == "tensorflow"]
        name = aliases[0].evaluated_alias or "tensorflow"
        module = "tensorflow.compat.v1"
        if name == "tensorflow":
            module = "tensorflow.compat.v1 as tensorflow"
        port.replace(node, port.text(node).replace("tensorflow", module, 1))
        port.insert(port.statement(node), f"{name}.disable_v2_behavior()", after=True)
        port.report(DONE, "TensorFlow 1", node, "imports tensorflow.compat.v1, as -c asks for")


def _port_steps(port: Port) -> None:
    """Broadcast the variables where they are initialized, and divide what the training steps are fed with."""
    steps = [call for call in port.calls if method(call) in ("minimize", "compute_gradients")]
    for call in steps:
        ask_about_noise(port, call)
        # The optimizer averages over the ranks, which is right for a mean only.
        loss = argument(call, "loss", 0)
        if scaling(port, loss) is not Scale.MEAN:
            port.report(OPEN, "sum or mean", call)
    applies = [call for call in port.calls if method(call) == "apply_gradients"]
    # The optimizer averages what its own ``compute_gradients`` gives, and not what ``tf.gradients`` does.
    if applies and "compute_gradients" not in map(method, steps):
        port.report(OPEN, "gradients from elsewhere", applies[0])
    targets = [port.target(port.statement(step)) for step in [*steps, *applies]]
    step_names = set(map(port.text, targets)) - {""}
    for call in port.calls:
        if method(call) != "run" or not call.args:
            continue
        # The run initializes: session.run(tf.global_variables_initializer()).
        if port.maker(call.args[0].value).endswith(WORDS_BY_TOPIC["initializes"]):
            port.imports.append(f"{_HOOKS}broadcast_global_variables")
            port.insert(
                port.own_statement(call),
                f"{port.text(call.func)}(broadcast_global_variables(0))",
                after=True,
            )
            port.report(DONE, "session: broadcast", call)
        elif any(name.value in step_names for name in matchers.findall(call, matchers.Name())):
            divide_feed(port, call)


def _add_hook(port: Port, call: Any) -> None:
    """Let a monitored session broadcast the variables, and only rank 0 write checkpoints."""
    port.imports.append(f"{_HOOKS}NPUBroadcastGlobalVariablesHook")
    hook = "NPUBroadcastGlobalVariablesHook(0)"
    hooks = argument(call, "hooks")
    if hooks is not None:
        # The hook comes before the others, which may read variables.
        port.replace(hooks, f"[{hook}, *{{}}]")
    elif call.args:
        port.replace(call.args[-1], f"{{}}, hooks=[{hook}]")
    else:
        port.replace(call, f"{dotted(call.func)}(hooks=[{hook}])")
    folder = argument(call, "checkpoint_dir")
    if folder is not None:
        port.replace(folder, "{} if npu.distribute.is_main() else None")
    port.report(DONE, "session: hook", call)


def port_strategies(port: Port) -> None:
    """Port what a script does with a strategy of ``tf.distribute``."""
    for call in port.calls:
        _port_strategy_call(port, call)
    for node in port.of(cst.Attribute):
        if node.attr.value != "num_replicas_in_sync":
            continue
        # fit averages over the ranks by itself, so that a loss would be divided twice.
        if _is_in_loss_of_keras(port, node):
            port.report(OPEN, "unsupported strategy calls", node)
        else:
            port.replace(node, "npu.distribute.size()")
            port.report(DONE, "replicas", node)
    # npu.open() reads TF_CONFIG, and a script that sets it may do so only afterwards.
    for node in port.of(cst.Assign):
        if "TF_CONFIG" in port.text(node.targets[0].target):
            port.report(OPEN, "TF_CONFIG", node)


def _is_in_loss_of_keras(port: Port, node: Any) -> bool:
    """Return True in the classes of a model, and in functions that ``compile`` is given."""
    compiles = [call for call in port.calls if method(call) == "compile"]
    names = {inner.value for call in compiles for inner in matchers.findall(call, matchers.Name())}
    for owner in port.around(node):
        if port.inherits(owner, ("Model", "Sequential", "Layer", "Loss")):
            return True
        if isinstance(owner, cst.FunctionDef) and owner.name.value in names:
            return True
    return False


def _port_strategy_call(port: Port, call: Any) -> None:
    name = port.name(call.func)
    makes_strategy = name.startswith("tensorflow.distribute.") and name.endswith("Strategy")
    if makes_strategy:
        _port_strategy(port, call, name)
    elif _is_reduce(port, call):
        _port_reduce(port, call)
    elif method(call) in WORDS_BY_TOPIC["only of a strategy"] and uses_strategy(port):
        port.report(OPEN, "unsupported strategy calls", call)


def _is_reduce(port: Port, call: Any) -> bool:
    """Return True for ``strategy.reduce(…)``, and not for functools.reduce."""
    if method(call) != "reduce" or len(call.args) < 2:
        return False
    return "strategy" in port.text(call.func.value).lower()


def _port_strategy(port: Port, call: Any, name: str) -> None:
    module, _, class_name = dotted(call.func).partition(".distribute.")
    # A TPU's optimizer is there for another machine.
    if "TPU" in name:
        port.report(NOTE, "TPU", call)
    elif class_name and "ParameterServer" not in name:
        port.replace(call, f"{module}.distribute.get_strategy()")
        port.report(DONE, "strategy", call)
    else:
        # The class may be imported by itself: from tensorflow.distribute import MirroredStrategy
        port.report(OPEN, "unsupported strategy calls", call)


def _port_reduce(port: Port, call: Any) -> None:
    reduction = last_word(port.text(argument(call, "reduce_op", 0)).lower().strip("\"'"))
    value = argument(call, "value", 1)
    # With an axis, ``reduce`` also reduces over the samples.
    is_plain = port.text(argument(call, "axis", 2)) in ("", "None")
    if not is_plain or value is None or reduction not in ("mean", "sum"):
        port.report(OPEN, "unsupported strategy calls", call)
        return
    # Only the data of training is divided: of a validation, each rank would add the whole.
    if reduction == "sum" and not _comes_from(port, value, training_steps(port)):
        port.report(OPEN, "sum outside of training", call)
        return
    moved = port.move(value, "value")
    port.replace(call, f'npu.distribute.all_reduce({moved}, reduction="{reduction}")')
    port.report(DONE, "strategy.reduce", call)


def _comes_from(port: Port, value: Any, steps: list) -> bool:
    """Return True if a value is what one of the steps, or a function that runs one, gives."""
    for node in follow(value, functools.partial(_sources, port)):
        if isinstance(node, cst.Call) and port.callees(node) and port.runs(node, steps):
            return True
    return False


def _sources(port: Port, node: Any) -> Iterable:
    # What a call returns counts, and not its arguments: a trained model may be one.
    if isinstance(node, cst.Call) and port.callees(node):
        return port.origins(node)
    if dotted(node):
        assignment = port.assigned(node)
        # One of several values may also be the result of a step: loss, accuracy = strategy.run(step)
        if assignment is not None:
            return [assignment.value]
        return port.origins(node)
    # The body of a loop isn't a part of what its variable gets.
    if isinstance(node, cst.For):
        return []
    return node.children


def uses_strategy(port: Port) -> bool:
    """Return True if a script names ``tf.distribute``."""
    names = map(port.name, port.of(cst.Attribute))
    return any(name.startswith("tensorflow.distribute") for name in names)


def port_horovod(port: Port) -> bool:
    """Change the imports of Horovod in a script; False if there are none."""
    imports = [pair for pair in port.imported if pair[0].split(".")[0] == "horovod"]
    for name, node in imports:
        is_plain = isinstance(node, cst.Import) and not node.names[0].asname
        # A plain import gets another name: import horovod
        if name == "horovod" and is_plain:
            port.replace(node, "from npu_device import horovod")
            port.report(DONE, "horovod", node)
        elif name == "horovod" or (
            name.startswith(WORDS_BY_TOPIC["faces of Horovod"]) and not is_plain
        ):
            # A plain "import horovod.tensorflow" would leave the name horovod to the original.
            port.replace(node, port.text(node).replace("horovod", "npu_device.horovod", 1))
            port.report(DONE, "horovod", node)
        else:
            port.report(OPEN, "other Horovod modules", node)
    return bool(imports)
