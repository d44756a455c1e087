"""Switches that each thread has for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


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
