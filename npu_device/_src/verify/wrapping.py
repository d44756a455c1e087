"""Wraps methods and functions of the libraries that a script uses, in a process of its own that is only looked at."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.world.current_step import current_step


def wrap(owner: Any, name: str, hook: Callable) -> None:
    """Let a hook be called instead of an attribute of a module or class, with that as its first argument."""
    setattr(owner, name, _wrapped(getattr(owner, name), hook))


def _wrapped(original: Callable, hook: Callable) -> Callable:
    @functools.wraps(original)
    @compat.do_not_convert
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapped


def fixing(**fixed: Any) -> Callable:
    """Return a hook that fixes some arguments."""
    return lambda original, *args, **kwargs: original(*args, **{**kwargs, **fixed})


def after(call: Callable[[Any], None]) -> Callable:
    """Return a hook that calls a method, and then a function with the object that has it."""

    def hook(original: Callable, owner: Any, *args: Any, **kwargs: Any) -> Any:
        returned = original(owner, *args, **kwargs)
        call(owner)
        return returned

    return hook


class ModelCalls:
    """The calls of Keras models that are running, of which some hold samples."""

    def __init__(self) -> None:
        self._depth = 0  # depth of calls among models that call models

    def hold_samples(self) -> bool:
        """Return True if a model that is called now gets samples to train with, and isn't part of another model."""
        step = current_step()
        is_dry_run = step is not None and step.is_dry_run
        return not self._depth and not is_dry_run and compat.a_tape_records()

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Let models that are called in the block be parts of the one that is called now."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
