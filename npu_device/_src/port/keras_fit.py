"""Models that ``fit`` trains: each gets ``npu.distribute.replicate``, once, where it is compiled or made."""

from __future__ import annotations

from typing import Any

import libcst as cst

from npu_device._src.port.port import DONE, OPEN, Port
from npu_device._src.port.script import dotted, method, parameters, walk

_TRAINS = ("fit", "fit_generator", "train_on_batch")
_KERAS_ARGUMENTS = {"epochs", "batch_size", "validation_data", "validation_split", "callbacks", "steps_per_epoch"}
_MAKERS = ("keras.models.", "keras.applications.", "keras.Model", "keras.Sequential", "keras.saving.load_model")
_MODEL, _COMPILED, _OTHER, _UNKNOWN = "model", "compiled", "other", "unknown"  # what a name is


def models(port: Port) -> None:
    """Replicate every model that the script compiles, or trains without compiling it here."""
    calls = [call for call in port.calls if method(call) in ("compile", *_TRAINS)]
    calls = [call for call in calls if not port.name(call.func.value)]
    for call in sorted(calls, key=lambda each: method(each) != "compile"):
        if method(call) != "compile":
            _trained(port, call)
        elif port.text(call.func.value) not in ("self", "super()"):
            _replicate(port, call, call.func.value)


def _replicate(port: Port, node: Any, model: Any, after: bool = True) -> None:
    name, scope = port.text(model), port.scope(node)
    if (name, scope) not in port.replicated and not isinstance(model, cst.Call):
        port.replicated.add((name, scope))
        target = f"{name} = " if dotted(model) and after else ""
        port.insert(port.statement(node), f"{target}npu.distribute.replicate({name})", after)
        port.found(DONE, "fit", node)


def _trained(port: Port, call: Any) -> None:
    model = call.func.value
    name, scopes = port.text(model), list(port.up(call))
    given = next(
        (each for each in scopes if isinstance(each, cst.FunctionDef) and name in parameters(each)), port.module
    )
    scopes = scopes[: scopes.index(given) + 1]  # a parameter is another model than one of this name outside
    if any(each == name and (scope in scopes or name.startswith("self.")) for each, scope in port.replicated):
        return
    kind = _kind(port, model)
    looks_so = method(call) != "fit" or {arg.keyword.value for arg in call.args if arg.keyword} & _KERAS_ARGUMENTS
    if kind == _COMPILED:
        port.replicated.add((name, port.scope(call)))
    elif kind == _MODEL or (kind == _UNKNOWN and looks_so and dotted(model)):
        made = port.assigned(model)
        here = made is not None and kind == _MODEL and made.scope is port.scope(call)
        _replicate(port, made.statement if made and here else call, model, after=here)
    elif kind == _UNKNOWN:
        port.found(OPEN, "fit of what", call)


def _kind(port: Port, node: Any, depth: int = 0) -> str:
    if isinstance(node, cst.Call):
        if port.name(node.func):
            return _MODEL if port.name(node.func).startswith(_MAKERS) else _OTHER
        if dotted(node.func) in port.classes:
            return _MODEL if port.inherits(port.classes[dotted(node.func)], ("Model", "Sequential")) else _OTHER
        if any(method(each) == "compile" for function in port.callees(node) for each in walk(function.body)):
            return _COMPILED
    kinds = [_kind(port, each, depth + 1) for each in port.origins(node)] if depth < 6 else []
    return next((each for each in kinds if each != _UNKNOWN), _UNKNOWN)


def is_built(port: Port, node: Any, at: Any) -> bool:
    """Return True if a model has its variables before a line: it was made of inputs, or called or built before."""
    name = dotted(node)
    for call in port.calls if name else ():
        is_use = dotted(call.func) == name or (method(call) in ("build", "summary") and dotted(call.func.value) == name)
        if is_use and port.scope(call) is port.scope(at) and port.line(call) < port.line(at):
            return True
    if not isinstance(node, cst.Call):
        return any(is_built(port, each, each) for each in port.origins(node))
    made = port.name(node.func)
    if made.endswith("Sequential"):
        return "Input(" in port.text(node) or "input_shape=" in port.text(node)
    return made.startswith(_MAKERS) or any(is_built(port, each, each) for each in port.origins(node))
