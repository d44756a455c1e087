"""The threads of a rank that call collectives: the calls of one group come in one order, and two threads have none.

The ranks compare with each call who makes it: the main thread, or the first, second, … thread of a name, in the order
in which those have started. In a ``tf.function`` that is looked up whenever the script calls the function. Threads that
the ranks could mix up, and calls that overlap, are refused on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Optional

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.time_limits import (
    THREAD_POOL_LOOK_SECONDS,
    THREAD_POOL_SECONDS,
    THREAD_POOL_SETTLED_SECONDS,
)
from npu_device._src.cluster.tracebacks import is_user_file
from npu_device._src.collectives.group import Group

# Names that Python gives to threads: with numbers of a process, which differ among the ranks.
_COUNTED_NAME = re.compile(r"^(Thread|ThreadPoolExecutor|asyncio)[-_]\d+(?:_\d+)?")
_NUMBER_IN_POOL = re.compile(r"_\d+$")
_POOLS = (
    "concurrent.futures.thread",
    "multiprocessing.pool",
)  # the modules of what their threads run
_MAIN = 0

Place = tuple[CodeType, int]
"""The instruction of the script that a thread is at."""


@dataclass
class _Caller:
    """What a thread has called: by group, where in the script it has called a function of it last, if not eagerly."""

    places: dict[int, Optional[Place]] = field(default_factory=dict)
    mixed_up: set[int] = field(
        default_factory=set
    )  # groups in which another living thread of its name calls, too
    work: int = 0  # which call of a function a thread of a pool was in, when its pool was looked at


def calling_thread() -> str:
    """Return a text about the calling thread that is the same on all ranks."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return thread.name
    return "a thread of TensorFlow" if _is_foreign(thread) else _identity(thread)


_identities: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()


def _identity(thread: threading.Thread) -> str:
    """Return the name of a thread, and its place among the living ones of that name; fixed at its first call."""
    found = _identities.get(thread)
    if found is None:
        name = _own_name(thread)
        alike = (
            []
            if _is_pooled(thread)
            else [each for each in threading.enumerate() if _are_alike(each, thread)]
        )
        place = (
            alike.index(thread) if thread in alike else 0
        )  # Python lists threads as they have started
        found = _identities[thread] = f"{name} ({place + 1})" if place else name
    return found


def _own_name(thread: threading.Thread) -> str:
    """Return the name of a thread without the numbers that depend on what else the process has started."""
    name = _COUNTED_NAME.sub(r"\1", thread.name)
    return _NUMBER_IN_POOL.sub("", name) if _is_pooled(thread) else name


def _is_foreign(thread: threading.Thread) -> bool:
    """Return True for a thread that TensorFlow has started."""
    return isinstance(thread, threading._DummyThread)


def _target(thread: threading.Thread) -> Any:
    """Return the function that a thread runs; the thread itself when it has returned, None if its class has ``run``."""
    return getattr(thread, "_target", thread)


def _are_alike(first: threading.Thread, second: threading.Thread) -> bool:
    return _own_name(first) == _own_name(second) and _target(first) == _target(second)


def _is_pooled(thread: threading.Thread) -> bool:
    """Return True for a thread of a pool, in which chance decides which thread gets which work."""
    return getattr(_target(thread), "__module__", None) in _POOLS


def _frames_of_script(thread: threading.Thread) -> Iterator[FrameType]:
    """Generate the frames of a thread that are in files of the user, innermost first."""
    is_this = thread is threading.current_thread()
    frame = sys._getframe() if is_this else sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _place_of(thread: threading.Thread) -> Place | None:
    return next(((frame.f_code, frame.f_lasti) for frame in _frames_of_script(thread)), None)


def _takes_turns() -> bool:
    """Return True in a replica of a ``tf.distribute.Strategy``, which lets its replicas take turns."""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


class CallingThreads:
    """The threads of this rank that call collectives."""

    def __init__(self) -> None:
        # By group and tag: the thread that is in an eager call.
        self._calling: dict[tuple[Group, int | None], threading.Thread] = {}
        self._callers: weakref.WeakKeyDictionary[threading.Thread, _Caller] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_call(self, group: Group) -> Iterator[bool]:
        """Note that this thread is in an eager call, and yield whether the ranks can mix it up with another one."""
        key, thread = (group, group.tag), threading.current_thread()
        is_unclear = group.tag is None and self._is_unclear(thread, group, None)
        if is_unclear or self._calling.setdefault(key, thread) is not thread:
            yield True
            return
        try:
            yield False
        finally:
            del self._calling[key]

    def number_at_each_call(self, group: Group) -> tf.Tensor:
        """Return the number of the thread that calls the ``tf.function`` being traced: int32, shape [].

        It is the same on all ranks; where the ranks can mix the thread up with another one, it differs on all.
        """
        return compat.at_each_call(
            f"npu_device_thread_{group.key}", functools.partial(self._number, group)
        )

    def _number(self, group: Group) -> tf.Tensor:
        thread = threading.current_thread()
        calling = self._calling.get((group, None), thread)
        if calling is not thread or self._is_unclear(thread, group, _place_of(thread)):
            return _constant(-1 - group.rank)
        name = calling_thread()
        return _constant(
            _MAIN if thread is threading.main_thread() else zlib.crc32(name.encode()) >> 1
        )

    def are_several(self, group: Group) -> bool:
        """Return True if several living threads of this rank have called in a group."""
        with self._lock:
            return (
                len([thread for thread, caller in self._living() if group.key in caller.places]) > 1
            )

    def _living(self) -> list[tuple[threading.Thread, _Caller]]:
        return [
            (thread, caller) for thread, caller in list(self._callers.items()) if thread.is_alive()
        ]

    def _is_unclear(self, thread: threading.Thread, group: Group, place: Place | None) -> bool:
        """Note a call, and return whether the ranks could take it for one of another thread, or it overlaps one."""
        if _is_foreign(thread) or _takes_turns():
            return False
        with self._lock:
            own = self._callers.setdefault(thread, _Caller())
            own.places[group.key] = place
            are_alone = len(self._callers) == 1
        is_pooled = _is_pooled(thread)
        if are_alone and not is_pooled:
            return False
        is_undecided = is_pooled and not self._has_pool_decided(thread, own)
        with self._lock:
            others = [
                (each, caller) for each, caller in self._living() if group.key in caller.places
            ]
            alike = [caller for each, caller in others if _own_name(each) == _own_name(thread)]
            if len(alike) > 1:
                for caller in alike:
                    caller.mixed_up.add(group.key)
            overlaps = any(
                each is not thread and _is_at(each, caller.places[group.key])
                for each, caller in others
            )
        return is_undecided or overlaps or group.key in own.mixed_up

    def _has_pool_decided(self, thread: threading.Thread, own: _Caller) -> bool:
        """Wait until the threads of a pool that do the same as this one have called, in whichever group, or ended.

        Return False if one still hasn't: on another rank it may do what this one does here.
        """
        work = _work_of(thread)
        if work is None:
            return True
        begin = time.monotonic()
        # A thread that has just got its work isn't seen to do it. Later calls of the same work needn't wait for that.
        settled_at = begin if own.work == id(work) else begin + THREAD_POOL_SETTLED_SECONDS
        while any(silent := self._silent_in_pool(thread, work)) or (
            len(silent) and time.monotonic() < settled_at
        ):
            if time.monotonic() - begin > THREAD_POOL_SECONDS:
                return False
            time.sleep(THREAD_POOL_LOOK_SECONDS)
        own.work = id(work)
        return True

    def _silent_in_pool(self, thread: threading.Thread, work: FrameType) -> list[bool]:
        """Return, for each other thread of a pool that has never called, whether it runs the same function."""
        pool = [
            each
            for each in threading.enumerate()
            if each is not thread and _are_alike(each, thread)
        ]
        with self._lock:
            silent = [each for each in pool if each not in self._callers]
        return [_does(each, work) for each in silent]


def _work_of(thread: threading.Thread) -> FrameType | None:
    """Return the call of a function of the script that a thread of a pool is in; None if it has nothing to do."""
    frames = list(_frames_of_script(thread))
    return frames[-1] if frames else None


def _does(thread: threading.Thread, work: FrameType) -> bool:
    """Return True if a thread runs the same function."""
    frame = _work_of(thread)
    return frame is not None and frame.f_code is work.f_code


def _is_at(thread: threading.Thread, place: Place | None) -> bool:
    """Return True if a thread is still in the call of a function that it has made at a place of the script."""
    return place is not None and _place_of(thread) == place


@functools.lru_cache(maxsize=64)
def _constant(number: int) -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(number, tf.int32)
