"""The threads of a rank that call collectives: the calls of one group come in one order, and two threads have none.

The ranks compare with each call who makes it: the main thread, or the thread of a name; for one of a pool also the
function that the pool has it run. At the first call of any other thread in a group they compare what it does. Threads
that the ranks could mix up, and calls that overlap, are refused on all ranks. In a ``tf.function`` all this is looked
up whenever the script calls the function.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.time_limits import (
    THREAD_LOOK_SECONDS,
    THREAD_ORDER_SECONDS,
    THREAD_SILENT_SECONDS,
)
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.thread_work import (
    Place,
    Work,
    digest_of_variables,
    is_at,
    is_at_work,
    is_clear,
    is_foreign,
    is_pooled,
    own_name,
    place_of,
    work_of,
)

_MAIN = 0
_MOST_COUNTED = 64  # names whose callers are counted, before the names of ended threads are dropped

Exchange = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Gathers a row of numbers from each rank of a group; every rank calls it at the first call of a thread."""


@dataclass
class _Caller:
    """What a thread has called, in its present work if a pool gives it some.

    Attributes:
        places: by group, where in the script it has called a function of it last, if not eagerly.
        compared: the groups in which the ranks have compared what the thread does.
        ordinal: how many threads of its name had called in the group, with it, when it called there first.
        mixed_up: the groups in which the ranks could take it for another living thread of its name.
    """

    work: Optional[Work]
    places: dict[int, Optional[Place]] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    ordinal: int = 0
    mixed_up: set[int] = field(default_factory=set)


def calling_thread() -> str:
    """Return a text about the calling thread that is the same on all ranks; in a pool, with the function it runs."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return thread.name
    if is_foreign(thread):
        return "a thread of TensorFlow"
    work = None
    if is_pooled(thread):
        work = work_of(thread)
    if work is None:
        return own_name(thread)
    return f"{own_name(thread)} ({work.function})"


def _named_alike(thread: threading.Thread) -> list[threading.Thread]:
    """Return the living threads of the same name, in the order in which they have started, as Python lists them."""
    name = own_name(thread)
    return [living for living in threading.enumerate() if own_name(living) == name]


def _namesakes(thread: threading.Thread) -> list[threading.Thread]:
    """Return the other living threads of the same name."""
    return [living for living in _named_alike(thread) if living is not thread]


def _place_of(thread: threading.Thread) -> int:
    """Return how many of the living threads of the same name have started before; 0 in a pool, which is of chance."""
    if is_pooled(thread):
        return 0
    return _named_alike(thread).index(thread)


def _takes_turns() -> bool:
    """Return True in a replica of a ``tf.distribute.Strategy``, which lets its replicas take turns."""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


class CallingThreads:
    """The threads of this rank that call collectives."""

    def __init__(self) -> None:
        # The thread that is in an eager call, by group and tag.
        self._calling: dict[tuple[Group, int | None], threading.Thread] = {}
        self._callers = weakref.WeakKeyDictionary[threading.Thread, _Caller]()
        self._lock = threading.Lock()
        # The work of threads whose arguments differ among the ranks, and that were alone.
        self._differing = set[str]()
        # The work of threads that came in different orders, with the group.
        self._disordered = set[tuple[str, int]]()
        # The number of threads that have called, by name and group, ended and refused ones included.
        self._numbers_of_callers = Counter[tuple[str, int]]()

    @contextlib.contextmanager
    def in_call(self, group: Group, exchange: Exchange) -> Iterator[bool]:
        """Note that this thread is in an eager call, and yield whether the ranks can mix it up with another one."""
        key, thread = (group, group.tag), threading.current_thread()
        is_unclear = group.tag is None and self._note_and_compare(thread, group, None, exchange)
        if is_unclear or self._calling.setdefault(key, thread) is not thread:
            yield True
            return
        try:
            yield False
        finally:
            del self._calling[key]

    def number_at_each_call(self, group: Group, exchange: Exchange) -> tf.Tensor:
        """Return the number of the thread that calls the ``tf.function`` being traced: int32, shape [].

        It is the same on all ranks; where the ranks can mix the thread up with another one, it differs on all.
        """
        return compat.at_each_call(
            f"npu_device_thread_{group.key}", functools.partial(self._number, group, exchange)
        )

    def _number(self, group: Group, exchange: Exchange) -> tf.Tensor:
        thread = threading.current_thread()
        place = place_of(thread)
        if self._calling.get((group, None), thread) is not thread:
            self._note(thread, group, place)
            return _constant(-1 - group.rank)
        if self._note_and_compare(thread, group, place, exchange):
            return _constant(-1 - group.rank)
        if thread is threading.main_thread():
            return _constant(_MAIN)
        return _constant(zlib.crc32(calling_thread().encode()) >> 1)

    def are_several(self, group: Group) -> bool:
        """Return True if several living threads of this rank have called in a group."""
        with self._lock:
            return len(self._living(group)) > 1

    def _living(self, group: Group) -> list[tuple[threading.Thread, _Caller]]:
        """Return the living threads that have called in a group, unless they are of a pool and have done that work."""
        living_callers = []
        for thread, caller in list(self._callers.items()):
            is_at_it = not is_pooled(thread) or work_of(thread) == caller.work
            if thread.is_alive() and is_at_it and group.key in caller.places:
                living_callers.append((thread, caller))
        return living_callers

    def _note_and_compare(
        self, thread: threading.Thread, group: Group, place: Place | None, exchange: Exchange
    ) -> bool:
        """Note a call, and return whether the ranks could take it for one of another thread, or it overlaps one."""
        if is_foreign(thread) or _takes_turns():
            return False
        own_caller = self._note(thread, group, place)
        if own_caller.work is None:
            if len(self._callers) == 1:
                return False
        elif group.key not in own_caller.compared:
            if self._compare_with_ranks(thread, group, own_caller.work, own_caller, exchange):
                own_caller.mixed_up.add(group.key)
            # The exchange was an eager call at this place of the script.
            own_caller.places[group.key] = place
        with self._lock:
            others = self._living(group)
            name = own_name(thread)
            alike = [caller for living, caller in others if own_name(living) == name]
            if len(alike) > 1:
                for caller in alike:
                    caller.mixed_up.add(group.key)
            overlaps = any(
                living is not thread and is_at(living, caller.places[group.key])
                for living, caller in others
            )
        return overlaps or group.key in own_caller.mixed_up

    def _note(self, thread: threading.Thread, group: Group, place: Place | None) -> _Caller:
        work = None
        if not is_clear(thread):
            work = work_of(thread)
        with self._lock:
            own_caller = self._callers.get(thread)
            if own_caller is None or own_caller.work != work:
                own_caller = self._callers[thread] = _Caller(work)
            if work is not None and group.key not in own_caller.compared:
                if len(self._numbers_of_callers) >= _MOST_COUNTED:
                    self._forget_ended()
                self._numbers_of_callers[own_name(thread), group.key] += 1
                own_caller.ordinal = self._numbers_of_callers[own_name(thread), group.key]
            own_caller.places[group.key] = place
            return own_caller

    def _forget_ended(self) -> None:
        """Drop the numbers of names that no living thread has: a script may give each of its threads a name."""
        names = {own_name(living) for living in threading.enumerate()}
        for key in [key for key in self._numbers_of_callers if key[0] not in names]:
            del self._numbers_of_callers[key]

    def _compare_with_ranks(
        self,
        thread: threading.Thread,
        group: Group,
        work: Work,
        own_caller: _Caller,
        exchange: Exchange,
    ) -> bool:
        """Compare with the other ranks what a thread does, at its first call in a group. Return True if they could take
        it for another one.
        """
        name = own_name(thread)
        ordinal = own_caller.ordinal

        def has_company() -> bool:
            return self._numbers_of_callers[name, group.key] != ordinal

        row = [work.digest, digest_of_variables(thread), int(work.is_told), _place_of(thread)]
        # The exchange is itself a call in the group, which compares the thread.
        own_caller.compared.add(group.key)
        try:
            rows = exchange(row)
        except BaseException:
            own_caller.compared.discard(group.key)
            raise
        if self._is_twin_silent(thread, work):
            return True
        if work.is_told and all(list(rank_row[:3]) == row[:3] for rank_row in rows):
            return has_company()
        if (work.function, group.key) in self._disordered:
            return True
        if self._is_disordered(thread, work, rows, has_company):
            self._disordered.add((work.function, group.key))
            return True
        self._differing.add(work.function)
        return False

    def _is_disordered(
        self,
        thread: threading.Thread,
        work: Work,
        rows: Sequence[Sequence[int]],
        has_company: Callable[[], bool],
    ) -> bool:
        """Return True if a thread does what another one does on another rank, given what differs among the ranks.

        The arguments of a single thread may differ, too. So another thread proves it, which may not have been started
        yet.
        """
        elsewhere = {row[0] for row in rows if row[0] != work.digest}
        end = time.monotonic() + THREAD_ORDER_SECONDS
        while True:
            works = [*map(work_of, _namesakes(thread))]
            if has_company() or any(
                twin_work and twin_work.digest in elsewhere for twin_work in works
            ):
                return True
            is_silent = bool(self._silent(thread, work))
            if work.function in self._differing and not is_silent:
                return False
            if time.monotonic() >= end:
                # Silent threads whose rows differ have started in a different order on other ranks.
                return is_silent and len({row[3] for row in rows}) > 1
            time.sleep(THREAD_LOOK_SECONDS)

    def _is_twin_silent(self, thread: threading.Thread, work: Work) -> bool:
        """Wait until the twins of a thread have called, in whichever group, or ended. Return True if one still hasn't:
        on another rank it may do what this one does here.
        """
        end = time.monotonic() + THREAD_SILENT_SECONDS
        while any(
            twin_work is None or twin_work.digest == work.digest
            for twin_work in self._silent(thread, work)
        ):
            if time.monotonic() > end:
                return True
            time.sleep(THREAD_LOOK_SECONDS)
        return False

    def _silent(self, thread: threading.Thread, work: Work) -> list[Work | None]:
        """Return the works of the other threads of a name that run the same function, or are about to run what isn't
        known yet, and haven't called in any group.
        """
        silent = []
        for living in _namesakes(thread):
            caller = self._callers.get(living)
            twin_work = work_of(living)
            has_called = caller is not None and twin_work is not None and caller.work == twin_work
            is_same = twin_work is None or twin_work.function == work.function
            if is_same and not has_called and is_at_work(living):
                silent.append(twin_work)
        return silent


@functools.lru_cache(maxsize=64)
def _constant(number: int) -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(number, tf.int32)
