"""What a body hears from the package: warnings and errors; and the settings under which it runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any, Callable
from unittest.mock import patch


@contextlib.contextmanager
def warnings_of_package() -> Iterator[list[str]]:
    """Collect what the package warns of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npu_device").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("npu_device").removeHandler(handler)


def hears(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a body, as its first argument, the list of what the package warns of while it runs."""

    @functools.wraps(body)
    def call(*arguments: Any) -> Any:
        with warnings_of_package() as said:
            return body(said, *arguments)

    return call


def error_of(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """Return the text of the error that a call raises, after its kind; "" if it succeeds."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


settings = functools.partial(patch.dict, os.environ)
"""Sets variables of the environment while a block runs."""
