"""A line in the log now and then while a rank waits, so that a waiting job doesn't look like a hanging one."""

from __future__ import annotations

import logging
import time
from typing import Callable

_FIRST_SECONDS = 10.0
_NEXT_SECONDS = 30.0

_log = logging.getLogger("npu_device")


class Progress:
    """Counts from its creation; the first line comes after 10 s, the others 30 s after each other."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + _FIRST_SECONDS

    def tell(self, what: Callable[[], str]) -> None:
        """Log a warning if it is time for one."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _NEXT_SECONDS
            _log.warning("after %.0f s: %s", now - self._began, what())
