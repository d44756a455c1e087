"""Threads and forks that end with the process that starts them, and switches that each thread has for itself."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator
from typing import Callable

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


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


def end_with_parent() -> None:
    """Have this forked process killed when the thread that has forked it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
