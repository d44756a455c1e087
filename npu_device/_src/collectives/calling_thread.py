"""The thread of a rank that makes a call: the calls of one group come in one order, and two threads have none.

The ranks compare the thread's name with the call. Threads that they could not tell apart are refused on all ranks.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Iterator

import tensorflow as tf

from npu_device._src.collectives.group import Group

_COUNTED_NAME = re.compile(r"^(Thread|ThreadPoolExecutor|asyncio)[-_]\d+(?:_\d+)?")
"""The names that Python gives to threads: numbers of a process, which differ among the ranks."""


def calling_thread() -> str:
    """Return the name of the calling thread as far as it is the same on all ranks."""
    thread = threading.current_thread()
    return "a thread of TensorFlow" if isinstance(thread, threading._DummyThread) else _own_name(thread)


def _own_name(thread: threading.Thread) -> str:
    """Return a thread's name without the number that Python gives to threads without a name."""
    return _COUNTED_NAME.sub(r"\1", thread.name)


class CallingThreads:
    """The threads of this rank that call collectives."""

    def __init__(self) -> None:
        # By group and tag: the thread that is in an eager call.
        self._calling: dict[tuple[Group, int | None], int] = {}
        # By thread: the groups in which it has called, and whether another living thread of its name has, too.
        self._alike: weakref.WeakKeyDictionary[threading.Thread, dict[int, bool]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_call(self, group: Group) -> Iterator[bool]:
        """Note that this thread is in a call of the group, and yield whether the ranks can mix it up with another."""
        key, me = (group, group.tag), threading.get_ident()
        if group.tag is None and self._mixed_up(group):
            yield True
        elif not tf.executing_eagerly():
            yield False
        elif self._calling.setdefault(key, me) != me:
            yield True
        else:
            try:
                yield False
            finally:
                del self._calling[key]

    def _mixed_up(self, group: Group) -> bool:
        """Return whether another living thread that calls in the group has this thread's name, or had it once: the
        ranks cannot tell the two apart.
        """
        me, key = threading.current_thread(), group.key
        if me is threading.main_thread() or isinstance(me, threading._DummyThread) or _is_replica_of_a_strategy():
            return False
        with self._lock:
            self._alike.setdefault(me, {}).setdefault(key, False)
            found = [
                groups
                for one, groups in self._alike.items()
                if key in groups and one.is_alive() and _own_name(one) == _own_name(me)
            ]
            if len(found) > 1:
                for groups in found:
                    groups[key] = True
            return self._alike[me][key]


def _is_replica_of_a_strategy() -> bool:
    """Return whether the thread belongs to a ``tf.distribute.Strategy``, which lets them take turns."""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None
