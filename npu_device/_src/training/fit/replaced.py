"""Methods of a model and of its metrics, losses and layers that are replaced while one of its steps runs."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

_ABSENT = object()


class Replaced:
    """The methods that are replaced now."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, thing: Any, name: str, hook: Callable[..., Any]) -> None:
        """Replace a method of an object, and of no class, by ``hook(own method, *arguments)``."""
        own = getattr(thing, name)
        self.keep(thing, name)
        vars(thing)[name] = tf.autograph.experimental.do_not_convert(lambda *args, **kwargs: hook(own, *args, **kwargs))

    def keep(self, thing: Any, name: str) -> None:
        """Give an object this attribute back as it is now, whatever sets it until then."""
        self._before.append((thing, name, vars(thing).get(name, _ABSENT)))

    def restore(self) -> None:
        """Give the objects their own methods and attributes back."""
        while self._before:
            thing, name, before = self._before.pop()
            if before is _ABSENT:
                vars(thing).pop(name, None)
            else:
                vars(thing)[name] = before
