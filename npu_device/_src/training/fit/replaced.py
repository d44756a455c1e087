"""Methods of a model, its layers, losses and metrics that are replaced while a step runs."""

from __future__ import annotations

from typing import Any, Callable

from npu_device._src import compat


class Replaced:
    """What is replaced on objects, and was there before."""

    _ABSENT = object()

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, hook: Callable) -> None:
        """Replace a method of an object, and of no class, by ``hook(own method, *arguments)``."""
        method = compat.converted(owner, name)
        self.keep(owner, name)
        # Set past Keras's own ``__setattr__``, which would track the method as something to save.
        vars(owner)[name] = compat.do_not_convert(
            lambda *args, **kwargs: hook(method, *args, **kwargs)
        )

    def keep(self, owner: Any, name: str) -> None:
        """Give an object this attribute back as it is now, whatever sets it until then."""
        original = vars(owner).get(name, self._ABSENT)
        self._originals.append((owner, name, original))

    def restore(self) -> None:
        """Give all objects their attributes back."""
        # The last one first, since a method may have been replaced twice.
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is self._ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = original
