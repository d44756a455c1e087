"""The arguments of ``fit``, ``evaluate`` and ``predict``, by Keras's names."""

from __future__ import annotations

import inspect
from typing import Any, Callable

from npu_device._src import compat

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REST, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Arguments:
    """What a call passes to a method of a model.

    A class's own method may pass on what it doesn't name itself: ``def fit(self, *args, **kwargs)``. Such arguments are
    recognised by the signature of Keras's method.

    Raises:
        TypeError: they don't fit the method.
    """

    def __init__(self, model: Any, own: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._own = own
        self._bound = inspect.signature(own).bind(*args, **kwargs)
        parameters = self._bound.signature.parameters.values()
        self._named = {each.name for each in parameters if each.kind not in (_REST, _KEYWORDS)}
        self._rest = next((each.name for each in parameters if each.kind is _REST), "")
        self._keywords = next((each.name for each in parameters if each.kind is _KEYWORDS), "")
        # What comes after the named ones is passed on in Keras's order.
        before = sum(each.kind in _POSITIONAL for each in parameters)
        self._in_order = _keras_names(model, own.__name__)[before:]

    def get(self, name: str) -> Any:
        arguments = self._bound.arguments
        if name in self._named:
            return arguments.get(name)
        rest = arguments.get(self._rest, ())
        if name in self._in_order[: len(rest)]:
            return rest[self._in_order.index(name)]
        return arguments.get(self._keywords, {}).get(name)

    def set(self, name: str, value: Any) -> None:
        """Replace or add an argument; nothing happens if the method takes none of that name."""
        arguments = self._bound.arguments
        rest = arguments.get(self._rest, ())
        if name in self._named:
            arguments[name] = value
        elif name in self._in_order[: len(rest)]:
            place = self._in_order.index(name)
            arguments[self._rest] = (*rest[:place], value, *rest[place + 1 :])
        elif self._keywords:
            arguments[self._keywords] = {**arguments.get(self._keywords, {}), name: value}

    def call(self) -> Any:
        return self._own(*self._bound.args, **self._bound.kwargs)


def _keras_names(model: Any, method: str) -> list[str]:
    """Return the names of the parameters of Keras's own method, without ``self``."""
    kerass = next(
        vars(kind)[method] for kind in type(model).__mro__ if method in vars(kind) and compat.belongs_to_keras(kind)
    )
    return list(inspect.signature(kerass).parameters)[1:]
