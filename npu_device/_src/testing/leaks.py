"""List what a process holds: threads, descriptors, child processes. A test that leaves more than it found fails."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from npu_device._src.cluster.time_limits import SETTLED_SECONDS, SWEEP_SECONDS

Descriptions = dict[int, str]  # by the number of a thread, descriptor or process


@dataclass(frozen=True)
class Held:
    """The threads, descriptors and children of this process."""

    threads: Descriptions
    descriptors: Descriptions
    children: Descriptions

    def beyond(
        self, start: Held, kept_descriptors: Container[int] = (), kept_children: Container[int] = ()
    ) -> list[str]:
        """Return descriptions of what was not held at the start, and is not kept on purpose."""
        return [
            *_added("thread", self.threads, start.threads, ()),
            *_added("descriptor", self.descriptors, start.descriptors, kept_descriptors),
            *_added("process", self.children, start.children, kept_children),
        ]


def _added(
    noun: str, numbered: Descriptions, at_start: Descriptions, allowed: Container[int]
) -> list[str]:
    leaked = []
    for number, description in numbered.items():
        # A number may be used again, so the description has to match, too.
        if at_start.get(number) != description and number not in allowed:
            leaked.append(f"{noun} {number}: {description}")
    return leaked


def held() -> Held:
    # A thread that isn't Python's own is TensorFlow's: it shows up here when it has once called Python.
    threads = {}
    for thread in threading.enumerate():
        if not isinstance(thread, threading._DummyThread):
            threads[id(thread)] = thread.name
    children = {
        pid: command or "ended, and nobody has waited for it"
        for pid, command in children_of("self").items()
    }
    return Held(threads, _descriptors(), children)


def left_since(
    start: Held, allowed: Callable[[], tuple[Container[int], Container[int]]]
) -> list[str]:
    """Return what this process holds beyond the start, and keeps on purpose, when that has had time to go."""
    deadline = time.monotonic() + SETTLED_SECONDS
    # Collected and waited for: garbage in cycles holds sockets, and threads take a moment to end.
    while (leaks := held().beyond(start, *allowed())) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(SWEEP_SECONDS)
    return leaks


def _descriptors() -> Descriptions:
    descriptors = {}
    # TensorFlow 2.15 keeps this file open from when it makes its devices; 2.20 doesn't.
    kept_by_tensorflow = f"/proc/{os.getpid()}/cmdline"
    for descriptor in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path != kept_by_tensorflow:
                descriptors[int(descriptor)] = path
    return descriptors


def children_of(pid: int | str) -> Descriptions:
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
