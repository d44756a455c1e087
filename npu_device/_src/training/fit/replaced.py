"""Methods of a model, its layers, losses and metrics that are replaced: while a step runs, or for good."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

from npu_device._src import compat


class Replaced(contextlib.ExitStack):
    """Gives objects the attributes back that were there before; the last one first, as one may be replaced twice."""

    def replace(self, owner: Any, name: str, hook: Callable) -> None:
        """Replace a method of an object, and of no class, by ``hook(own method, *arguments)``."""
        method = compat.converted(owner, name)
        self.keep(owner, name)
        # Set past Keras's own ``__setattr__``, which would track the method as something to save.
        vars(owner)[name] = compat.do_not_convert(
            lambda *args, **kwargs: hook(method, *args, **kwargs)
        )

    def set(self, owner: Any, name: str, method: Any) -> None:
        """Set an attribute of an object."""
        self.keep(owner, name)
        # Set past Keras's own ``__setattr__``, which would track the method as something to save.
        object.__setattr__(owner, name, method)

    def keep(self, owner: Any, name: str) -> None:
        """Give an object this attribute back as it is now, whatever sets it until then."""
        attributes = vars(owner)
        if name in attributes:
            self.callback(attributes.__setitem__, name, attributes[name])
        else:
            self.callback(attributes.pop, name, None)
