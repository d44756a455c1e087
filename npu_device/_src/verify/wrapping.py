"""Wraps methods and functions of the libraries that a script uses, in a process of its own that is only looked at."""

from __future__ import annotations

import functools
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.world.current_step import current_step


def wrap(owner: Any, name: str, hook: Callable) -> None:
    """Let a hook be called instead of an attribute of a module or class, with that as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    @compat.do_not_convert
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, wrapped)


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


def of_samples(hook: Callable) -> Callable:
    """Return a hook of models' calls, which calls another one for a model that gets samples to train with, unless it is
    part of such a model.
    """
    is_running = False

    def called(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        step = current_step()
        is_dry_run = step is not None and step.is_dry_run
        if is_running or is_dry_run or not compat.a_tape_records():
            return original(model, *args, **kwargs)
        is_running = True
        try:
            return hook(original, model, *args, **kwargs)
        finally:
            is_running = False

    return called
