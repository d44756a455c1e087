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


@dataclass(frozen=True)
class Held:
    """The threads, descriptors and children of this process, by their numbers, with a description each."""

    threads: dict[int, str]
    descriptors: dict[int, str]
    children: dict[int, str]

    def beyond(
        self,
        before: Held,
        kept_descriptors: Container[int] = (),
        kept_children: Container[int] = (),
    ) -> list[str]:
        """Return descriptions of what was not there before, and is not kept on purpose."""
        return [
            f"{kind} {number}: {description}"
            for kind, now, then, kept in (
                ("thread", self.threads, before.threads, ()),
                ("descriptor", self.descriptors, before.descriptors, kept_descriptors),
                ("process", self.children, before.children, kept_children),
            )
            for number, description in now.items()
            if then.get(number) != description and number not in kept
        ]


def held() -> Held:
    # A thread that isn't Python's own is TensorFlow's: it shows up here when it has once called Python.
    threads = {
        id(one): one.name
        for one in threading.enumerate()
        if not isinstance(one, threading._DummyThread)
    }
    children = {
        pid: command or "ended, and nobody has waited for it"
        for pid, command in children_of("self").items()
    }
    return Held(threads, _descriptors(), children)


def left_since(
    before: Held, kept: Callable[[], tuple[Container[int], Container[int]]]
) -> list[str]:
    """Return what this process holds beyond what it held before, and keeps on purpose, when that has had time to go."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while (left := held().beyond(before, *kept())) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(SWEEP_SECONDS)
    return left


def _descriptors() -> dict[int, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    # TensorFlow 2.15 keeps this one from when it makes its devices, 2.20 doesn't. Can go with TensorFlow 2.15.
    kept_by_tensorflow = f"/proc/{os.getpid()}/cmdline"
    return {number: path for number, path in found.items() if path != kept_by_tensorflow}


def children_of(pid: int | str) -> dict[int, str]:
    """Return the command lines of the children of a process; it is empty for one that has ended."""
    found = {}
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # a thread, or a child, that has just ended
                for number in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    found[int(number)] = (
                        Path(f"/proc/{number}/cmdline")
                        .read_text(errors="replace")
                        .replace("\0", " ")
                    )
    return found
