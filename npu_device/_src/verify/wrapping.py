"""Wraps methods and functions of the libraries that a script uses, in a process of its own that is only looked at."""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow as tf


def wrap(*hooks: tuple[Any, str, Callable[..., Any]]) -> None:
    """Let hooks be called instead of attributes of modules and classes, with these as their first argument."""
    for owner, name, hook in hooks:
        setattr(owner, name, _wrapped(getattr(owner, name), hook))


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @tf.autograph.experimental.do_not_convert
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapped


def fixing(**fixed: Any) -> Callable[..., Any]:
    """Return a hook that fixes some arguments."""
    return lambda original, *args, **kwargs: original(*args, **{**kwargs, **fixed})
