"""List what a process holds: threads, descriptors, child processes. A test that leaves more than it found fails."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path

from npu_device._src.cluster.time_limits import SETTLED_SECONDS, SWEEP_SECONDS

Descriptions = dict[
    str, str
]  # by the number of a thread, descriptor or process, such as "thread 1"


def held() -> Descriptions:
    """Return the threads, descriptors and children of this process."""
    holdings = {}
    # A thread that isn't Python's own is TensorFlow's: it shows up here when it has once called Python.
    for thread in threading.enumerate():
        if not isinstance(thread, threading._DummyThread):
            holdings[f"thread {id(thread)}"] = thread.name
    # TensorFlow 2.15 keeps this file open from when it makes its devices; 2.20 doesn't.
    kept_by_tensorflow = f"/proc/{os.getpid()}/cmdline"
    for descriptor in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path != kept_by_tensorflow:
                holdings[f"descriptor {descriptor}"] = path
    for pid, command in children_of("self").items():
        holdings[f"process {pid}"] = command or "ended, and nobody has waited for it"
    return holdings


def added(start: Descriptions, allowed: Container[str] = ()) -> list[str]:
    """Return what this process holds that was not held at the start, and is not kept on purpose, such as
    "descriptor 3".
    """
    # A number may be used again, so the description has to match, too.
    return [
        f"{name}: {description}"
        for name, description in held().items()
        if start.get(name) != description and name not in allowed
    ]


def left_since(start: Descriptions, allowed: Callable[[], Container[str]]) -> list[str]:
    """Return what this process holds beyond the start, and keeps on purpose, when that has had time to go."""
    deadline = time.monotonic() + SETTLED_SECONDS
    # Collected and waited for: garbage in cycles holds sockets, and threads take a moment to end.
    while (leaks := added(start, allowed())) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(SWEEP_SECONDS)
    return leaks


def children_of(pid: int | str) -> dict[int, str]:
    """Return the command lines of the children of a process; it is empty for one that has ended."""
    children = {}
    # The process may have ended.
    with contextlib.suppress(OSError):
        # Each thread has its own list of children.
        for task in os.listdir(f"/proc/{pid}/task"):
            # A thread or a child may have just ended.
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    command = Path(f"/proc/{child}/cmdline").read_text(errors="replace")
                    children[int(child)] = command.replace("\0", " ")
    return children
