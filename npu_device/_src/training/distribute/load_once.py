"""``npu.distribute.load_once``: one rank of each host loads data, and all its ranks map them.

A host stands for ranks that share memory. Its lowest rank loads, puts arrays and the packed rest into memory, and
writes into the store where that is, or the error. Every rank reads this of all hosts, so that an error is raised on
every rank, and the hosts can be compared.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import (
    LATEST_ANSWER_SECONDS,
    LOAD_CHECK_SECONDS,
    LOAD_NOTICE_SECONDS,
)
from npu_device._src.collectives.engine_text import say
from npu_device._src.collectives.engines.host.sharing import Offer
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.world.sent_objects import packed, unpacked
from npu_device._src.world.shared_arrays import (
    Address,
    Place,
    array_at,
    mapped,
    places_of,
    published,
    require_numbers,
    with_arrays,
)
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_UNITS = ("B", "kB", "MB", "GB")


class _LoadCount:
    """Counts the calls of a job: every rank makes the same ones."""

    def __init__(self) -> None:
        self.count = 0


def load_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on one rank of each host; return its result on every rank, with the arrays in shared memory.

    Args:
        function: loads and prepares the data; the same on every rank.
        *arguments: passed to it.

    Returns:
        What the function returned. Its numpy arrays, alone or in tuples, lists, dicts and dataclasses, are read-only,
        and exist once on each host: ``fit`` of a replicated model doesn't copy them either. The rest is sent as by
        ``broadcast_object``. On a single device and in a child of a rank, the function runs there.

    Raises:
        TypeError: an array of Python objects.
        RuntimeError: the function failed on another rank; the text has its traceback. Or the hosts loaded different
            arrays, or the loading rank is gone.

    Every rank has to make the call; the others wait as long as the loading rank lives.

    >>> import numpy as np
    >>> import npu_device as npu
    >>> data = npu.distribute.load_once(np.arange, 3)  # a single device
    >>> data[0] = 1
    Traceback (most recent call last):
    ValueError: assignment destination is read-only
    """
    world = world_unless_child()
    if world is None or world.size == 1:
        return with_arrays(function(*arguments), _read_only)
    return load(world, function, *arguments)


def load(world: World, function: Callable[..., Any], *arguments: Any, quiet: bool = False) -> Any:
    """Load as ``load_once`` on several ranks; ``quiet`` without the line at the start."""
    loads = world.job.made(_LoadCount)
    loads.count += 1
    exchange = _Exchange(world, loads.count)
    if exchange.loads:
        exchange.publish(function, arguments)
    notes = exchange.notes()
    try:
        exchange.require_equal(notes)
        result = exchange.received(notes)
        # The memory has no name any more once all ranks have mapped it.
        exchange.store.gather(exchange.key, None, LATEST_ANSWER_SECONDS)
    finally:
        exchange.withdraw()
    exchange.forget()
    if world.is_main and not quiet:
        say([_line(world, notes)])
    return result


class _Exchange:
    """One call of ``load_once`` on this rank."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.store = world.job.store
        self.key = f"load_once/{number}"
        leaders = world.job.hosts.leaders
        self.leaders = sorted(set(leaders))
        self.leader = leaders[world.rank]
        self.loads = self.leader == world.rank
        self._offer: Offer | None = None
        self._loaded: tuple[Any, list[Place]]  # what the others read

    def publish(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Run the function, and tell the others where its result is, or its error."""
        try:
            note = self._published(function(*arguments))
        except BaseException as error:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self.store.set(self._key_of(self.leader), json.dumps({"error": text.rstrip()}))
            raise
        self.store.set(self._key_of(self.leader), json.dumps(note))

    def _published(self, result: Any) -> dict[str, Any]:
        numbers: dict[Any, int] = {}
        arrays: list[np.ndarray] = []
        names: list[str] = []

        def taken(array: np.ndarray, name: str) -> np.ndarray:
            require_numbers(array, name)
            # The same array in two places of the result lies in the memory once.
            numbers_in_memory = (array.ctypes.data, array.shape, array.strides, array.dtype)
            if numbers.setdefault(numbers_in_memory, len(arrays)) == len(arrays):
                arrays.append(array)
                names.append(name)
            return np.array(numbers[numbers_in_memory])

        # Each array in the rest is the number of one in the memory.
        rest = with_arrays(result, taken)
        places = places_of(arrays)
        self._loaded = rest, places
        content = packed((rest, [tuple(place) for place in places]), self.world.job.cluster.trusted)
        self._offer, address = published(arrays, places, content)
        facts = []
        # Checksums are computed for several hosts only, since that of a GiB takes a second.
        if len(self.leaders) > 1:
            memory = memoryview(mapped(address))
            for name, array, place in zip(names, arrays, places):
                checksum = zlib.crc32(memory[place.offset :][: array.nbytes])
                facts.append(
                    f"{name} is {array.dtype} of shape {array.shape}, checksum {checksum:08x}"
                )
        return {
            "address": address,
            "rest": len(content),
            "bytes": sum(array.nbytes for array in arrays),
            "facts": facts,
        }

    def notes(self) -> dict[int, dict[str, Any]]:
        """Return what the loading ranks of all hosts tell; raise on every rank if one of them failed."""
        notes = {leader: json.loads(self._wait(leader)) for leader in self.leaders}
        for leader, note in notes.items():
            if "error" in note:
                self.withdraw()
                raise ClusterError(
                    f"rank {self.world.rank}: the function that load_once called failed on rank {leader}:\n"
                    f"{note['error']}\nWhat to do: fix the error on rank {leader}."
                )
        return notes

    def _wait(self, leader: int) -> str:
        health = self.world.job.health
        began = time.monotonic()
        next_line = began + LOAD_NOTICE_SECONDS
        # One rank is enough to tell that all wait.
        tells = self.world.rank == (1 if leader == 0 else 0)
        while True:
            try:
                return self.store.get(self._key_of(leader), LOAD_CHECK_SECONDS)
            except TimeoutError:
                health.require_running()
            if health.has_left(leader):
                raise PeerError(
                    f"rank {leader} has left the job before its load_once, for which rank {self.world.rank} waits.\n"
                    "What to do: call load_once on every rank."
                )
            if tells and time.monotonic() > next_line:
                next_line += LOAD_NOTICE_SECONDS
                waited = time.monotonic() - began
                _log.warning(
                    "load_once: the other ranks have waited %.0f s for the function on rank %d",
                    waited,
                    leader,
                )

    def require_equal(self, notes: dict[int, dict[str, Any]]) -> None:
        """Raise on every rank if the hosts have loaded different arrays."""
        facts = [note["facts"] for note in notes.values()]
        if facts.count(facts[0]) == len(facts):
            return
        different = {
            leader: [fact for fact in note["facts"] if any(fact not in other for other in facts)]
            for leader, note in notes.items()
        }
        texts = {leader: "; ".join(found) or "no such array" for leader, found in different.items()}
        lines = "\n".join(self.world.job.cluster.lines(texts))
        raise ClusterError(
            f"load_once: the hosts have loaded different arrays:\n{lines}\n"
            "Likely cause: the function draws or shuffles without a seed, lists files in any order, or finds different "
            "files.\nWhat to do: seed generators in the function, sort lists of files, and give every host the same "
            "files."
        )

    def received(self, notes: dict[int, dict[str, Any]]) -> Any:
        """Map the memory of this host; return the result with the arrays that lie in it."""
        note = notes[self.leader]
        trusted = self.world.job.cluster.trusted
        memory = mapped(Address(*note["address"]))
        # Read on the rank that loads, too, so that what can't be sent is an error on all ranks.
        if not self.loads or not trusted:
            content = memory[len(memory) - note["rest"] :]
            [(rest, places)] = unpacked(content, [f"rank {self.leader}"], trusted)
        if self.loads:
            rest, places = self._loaded
        arrays = [array_at(memory, Place(*place)) for place in places]
        return with_arrays(rest, lambda number, name: arrays[int(number)])

    def withdraw(self) -> None:
        if self._offer is not None:
            self._offer.withdraw()

    def forget(self) -> None:
        """Delete the note of this rank; after an error it stays, as others may not have read it yet."""
        if self.loads:
            self.store.delete(self._key_of(self.leader))

    def _key_of(self, leader: int) -> str:
        return f"{self.key}/{leader}"


def _read_only(array: np.ndarray, name: str) -> np.ndarray:
    require_numbers(array, name)
    view = array.view()
    view.flags.writeable = False
    return view


def _line(world: World, notes: dict[int, dict[str, Any]]) -> str:
    """Return the line at the start."""
    # Ranks in containers of their own share a host, but no memory.
    leaders = list(notes)
    hosts = world.job.cluster.hosts
    if len(leaders) == 1:
        where = f"once on host {hosts[0]}"
    elif len(leaders) == len(set(hosts)):
        where = f"once on each of {len(leaders)} hosts"
    else:
        where = f"in {len(leaders)} copies, as not all ranks of a host share memory"
    first = notes[leaders[0]]
    return (
        f"npu_device: load_once  {_size(first['bytes'])} {where}; "
        f"{_size(first['rest'])} of other objects on each rank"
    )


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"
