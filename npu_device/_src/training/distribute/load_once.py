"""``npu.distribute.load_once``: one rank of each host loads data, and all its ranks map them.

A host stands for ranks that share memory. Its lowest rank loads, puts the arrays into memory, and the packed skeleton
of the result behind them. It writes a note into the store: where that is, or the error. Every rank reads the notes of
all hosts, so that an error is raised on every rank, and the hosts can be compared.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from npu_device._src import compat
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import LOAD_CHECK_SECONDS, LOAD_NOTICE_SECONDS
from npu_device._src.collectives.engine_text import say
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.wording import amount, shortened
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
_MOST_LISTED = 10  # arrays of a host, in the error for different ones

Notes = dict[int, dict[str, Any]]
"""By its loading rank, where the result of a host lies: ``address`` of the memory, ``packed_bytes`` behind the arrays,
``array_bytes``, and a ``digest`` of the arrays. Or the ``error`` of the function.
"""


class _CallNumbers(itertools.count):
    """Numbers the calls of a job, of which it is a component: every rank makes the same ones."""


def load_once(function: Callable, *arguments: Any) -> Any:
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


def load(world: World, function: Callable, *arguments: Any, quiet: bool = False) -> Any:
    """Load as ``load_once`` on several ranks; ``quiet`` without the line at the start."""
    load_call = _LoadCall(world, next(world.job.component_or_new(_CallNumbers)))
    with load_call.offers:
        if load_call.is_loading_rank:
            load_call.publish(function, arguments)
        notes = load_call.notes()
        load_call.require_equal(notes)
        result = load_call.received(notes)
        # The memory has no name any more once all ranks have mapped it.
        with compat.eager_mode():
            world.wait()
    load_call.delete_note()
    if world.is_main and not quiet:
        say([_sizes_line(world, notes)])
    return result


class _LoadCall:
    """One call of ``load_once`` on this rank."""

    def __init__(self, world: World, call_index: int) -> None:
        self.world = world
        self.control = world.job.control
        self.key = f"load_once/{call_index}"
        leaders = world.job.hosts.leaders
        self.loading_ranks = sorted(set(leaders))
        self.loading_rank = leaders[world.rank]  # on this host
        self.is_loading_rank = self.loading_rank == world.rank
        self.offers = contextlib.ExitStack()  # withdraws the memory at its end
        self._descriptions: list[str] = []  # of its arrays, for the other hosts

    def publish(self, function: Callable, arguments: tuple) -> None:
        """Run the function, and tell the others where its result is, or its error."""
        try:
            note = self._note_of(function(*arguments))
        except BaseException:
            note = {"error": traceback.format_exc().rstrip()}
            raise
        finally:
            # The other ranks wait for the note, also after an error.
            self.control.set(self._key_of(self.loading_rank), json.dumps(note))

    def _note_of(self, result: Any) -> dict[str, Any]:
        """Put a result into memory, and return the note that tells where."""
        indices: dict[Any, int] = {}
        arrays: list[np.ndarray] = []
        names = []

        def numbered(array: np.ndarray, name: str) -> np.ndarray:
            require_numbers(array, name)
            # The same array in two places of the result lies in the memory once.
            identity = (array.ctypes.data, array.shape, array.strides, array.dtype)
            index = indices.setdefault(identity, len(arrays))
            if index == len(arrays):
                arrays.append(array)
                names.append(name)
            return np.array(index)

        # Each array in the skeleton is the number of one in the memory.
        skeleton = with_arrays(result, numbered)
        places = places_of(arrays)
        trusted = self.world.job.cluster.is_trusted
        content = packed((skeleton, [tuple(place) for place in places]), trusted)
        offer, address = published(arrays, places, content)
        self.offers.callback(offer.withdraw)
        # Checksums are computed for several hosts only, since a GiB takes a second.
        if len(self.loading_ranks) > 1:
            memory = memoryview(mapped(address))
            for name, array, place in zip(names, arrays, places):
                checksum = zlib.crc32(memory[place.offset :][: array.nbytes])
                self._descriptions.append(
                    f"{name} is {array.dtype} of shape {array.shape}, checksum {checksum:08x}"
                )
        return {
            "address": address,
            "packed_bytes": len(content),
            "array_bytes": sum(array.nbytes for array in arrays),
            # The descriptions themselves may be larger than what the hub takes.
            "digest": zlib.crc32("\n".join(self._descriptions).encode()),
        }

    def notes(self) -> Notes:
        """Return the notes of all hosts; raise on every rank if the function failed on one of them."""
        notes = {rank: json.loads(self._wait_for_note(rank)) for rank in self.loading_ranks}
        for rank, note in notes.items():
            if "error" in note:
                raise ClusterError(
                    f"rank {self.world.rank}: the function that load_once called failed on rank {rank}:\n"
                    f"{note['error']}\nWhat to do: fix the error on rank {rank}."
                )
        return notes

    def _wait_for_note(self, loading_rank: int) -> str:
        health = self.world.job.health
        began = time.monotonic()
        next_line = began + LOAD_NOTICE_SECONDS
        # One rank is enough to tell that all wait.
        is_first_waiting = self.world.rank == int(loading_rank == 0)
        while True:
            try:
                return self.control.get(self._key_of(loading_rank), LOAD_CHECK_SECONDS)
            except TimeoutError:
                health.require_running()
            if health.has_left(loading_rank):
                raise PeerError(
                    f"rank {loading_rank} has left the job before its load_once, for which rank {self.world.rank} "
                    "waits.\n"
                    "What to do: call load_once on every rank."
                )
            if is_first_waiting and time.monotonic() > next_line:
                next_line += LOAD_NOTICE_SECONDS
                _log.warning(
                    "load_once: the other ranks have waited %.0f s for the function on rank %d",
                    time.monotonic() - began,
                    loading_rank,
                )

    def require_equal(self, notes: Notes) -> None:
        """Raise on every rank if the hosts have loaded different arrays."""
        if len({note["digest"] for note in notes.values()}) == 1:
            return
        by_rank = self.world.objects(self._descriptions, "load_once")
        # What not all hosts have.
        common = set.intersection(*(set(by_rank[rank]) for rank in notes))
        texts = {}
        for rank in notes:
            differing = [text for text in by_rank[rank] if text not in common]
            listed = shortened(differing, _MOST_LISTED, separator="; ")
            texts[rank] = listed or "no such array"
        lines = "\n".join(self.world.job.cluster.lines(texts))
        raise ClusterError(
            f"load_once: the hosts have loaded different arrays:\n{lines}\n"
            "Likely cause: the function draws or shuffles without a seed, lists files in any order, or finds different "
            "files.\nWhat to do: seed generators in the function, sort lists of files, and give every host the same "
            "files."
        )

    def received(self, notes: Notes) -> Any:
        """Map the memory of this host; return the result with the arrays that lie in it."""
        note = notes[self.loading_rank]
        trusted = self.world.job.cluster.is_trusted
        memory = mapped(Address(*note["address"]))
        # Read on the rank that loads, too, so that what can't be sent is an error on all ranks.
        content = memory[len(memory) - note["packed_bytes"] :]
        [(skeleton, places)] = unpacked(content, [f"rank {self.loading_rank}"], trusted)
        arrays = [array_at(memory, Place(*place)) for place in places]
        return with_arrays(skeleton, lambda index, name: arrays[int(index)])

    def delete_note(self) -> None:
        """Delete the note of this rank; after an error it stays, as others may not have read it yet."""
        if self.is_loading_rank:
            self.control.delete(self._key_of(self.loading_rank))

    def _key_of(self, loading_rank: int) -> str:
        return f"{self.key}/{loading_rank}"


def _read_only(array: np.ndarray, name: str) -> np.ndarray:
    require_numbers(array, name)
    # A view, since the array itself belongs to the function, which may go on writing.
    view = array.view()
    view.flags.writeable = False
    return view


def _sizes_line(world: World, notes: Notes) -> str:
    """Return the line at the start, with the bytes in shared memory and those that each rank has."""
    # Ranks in containers of their own share a host, but no memory.
    hosts = world.job.cluster.hosts
    if len(notes) == 1:
        where = f"once on host {hosts[0]}"
    elif len(notes) == len(set(hosts)):
        where = f"once on each of {len(notes)} hosts"
    else:
        where = f"in {len(notes)} copies, as not all ranks of a host share memory"
    first = next(iter(notes.values()))
    return (
        f"npu_device: load_once  {amount(first['array_bytes'])} {where}; "
        f"{amount(first['packed_bytes'])} of other objects on each rank"
    )
