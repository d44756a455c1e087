"""Threads that end with the process, and switches that each thread has for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Callable


class ThreadSwitch(threading.local):
    """A switch that is off in each thread, but for the blocks in which it is on."""

    is_on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = self.is_on
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = before


def start_thread(name: str, run: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a thread that doesn't keep the process from ending."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
