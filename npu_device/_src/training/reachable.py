"""What the steps of a Keras model can reach: what it holds, and what its own functions use."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from npu_device._src import compat

_FRAMEWORKS = {"keras", "tf_keras", "tensorflow", "numpy", "npu_device", "builtins", "logging", "threading", "wrapt"}
_LONGEST = 1000
"""Elements of a list or dict that are looked at: optimizers and variables aren't kept by the thousand."""


def reachable(model: Any) -> Iterator[Any]:
    """Yield a model and what it reaches, each once, in the same order on every rank.

    That are its attributes and its layers' attributes; what is in lists, dicts and objects of the user's own classes
    among them; and what the user's own functions use: closures, defaults, and globals that they name. Objects of
    TensorFlow and Keras other than layers are yielded, but not looked into.
    """
    waiting = deque([model])
    seen: dict[int, Any] = {}
    while waiting:
        thing = waiting.popleft()
        if id(thing) not in seen:
            seen[id(thing)] = thing
            yield thing
            waiting.extend(_parts(thing))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, (type, types.ModuleType, str, bytes, int, float, type(None))):
        return []
    if isinstance(thing, Mapping):
        return list(thing.values())[:_LONGEST]
    if isinstance(thing, (list, tuple)):
        return thing[:_LONGEST]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.FunctionType):
        return _used_by(thing)
    if compat.is_layer(thing):
        return [*_attributes(thing), *compat.all_layers(thing), *_methods(thing)]
    if hasattr(type(thing), "python_function"):  # a tf.function
        return [thing.python_function]
    if _is_framework(type(thing)):
        return []
    return [*_attributes(thing), *_methods(thing)]


def _attributes(thing: Any) -> list[Any]:
    held = getattr(thing, "__dict__", {})
    return [held[name] for name in sorted(held)]


def _methods(thing: Any) -> list[Any]:
    """Return the functions of the class of an object, without those of a framework."""
    own = [kind for kind in type(thing).__mro__ if not _is_framework(kind)]
    found = [value for kind in own for value in vars(kind).values()]
    found += [value.fget for value in found if isinstance(value, property)]
    return [value for value in found if isinstance(value, types.FunctionType) or hasattr(value, "python_function")]


def _used_by(function: types.FunctionType) -> list[Any]:
    wrapped = getattr(function, "__wrapped__", None)
    if _is_framework(function):
        return [] if wrapped is None else [wrapped]
    cells = [_content(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    return [wrapped, *cells, *defaults, *named]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _names(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


def _is_framework(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _FRAMEWORKS
