"""Methods of a model, its layers, losses and metrics that are replaced while a step runs."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat

_as_it_is = tf.autograph.experimental.do_not_convert


class Replaced:
    """What is replaced on objects, and was there before."""

    _ABSENT = object()

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, thing: Any, name: str, hook: Callable[..., Any]) -> None:
        """Replace a method of an object, and of no class, by ``hook(own method, *arguments)``."""
        own = compat.converted(thing, name)
        self.keep(thing, name)
        vars(thing)[name] = _as_it_is(lambda *args, **kwargs: hook(own, *args, **kwargs))

    def keep(self, thing: Any, name: str) -> None:
        """Give an object this attribute back as it is now, whatever sets it until then."""
        self._before.append((thing, name, vars(thing).get(name, self._ABSENT)))

    def restore(self) -> None:
        while self._before:
            thing, name, before = self._before.pop()
            if before is self._ABSENT:
                vars(thing).pop(name, None)
            else:
                vars(thing)[name] = before
