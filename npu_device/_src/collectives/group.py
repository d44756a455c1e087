"""Groups of ranks that take part in a collective: the group of all ranks, and groups that the script makes.

Each process makes its groups on its own; nothing is sent. Ranks that don't belong to a group don't know it, and
disjoint sets of ranks may use one name for different groups. The calls for scripts are in
``training.distribute.groups``. Imports no TensorFlow, so that a split strategy can be set before anything else.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable, TypeVar

WORLD_GROUP = "hccl_world_group"
"""The group of all ranks, which always exists."""

_WORLD_KEY = 2
_MAX_NAME_BYTES = 127


def check_group_name(name: Any) -> None:
    """Raise ValueError if the name that a script gives isn't a text, is empty, or longer than 127 bytes in UTF-8."""
    expected = f"expected a str of 1 to {_MAX_NAME_BYTES} bytes"
    if not isinstance(name, str) or not name:
        raise ValueError(f"group {name!r} is not the name of a group; {expected}")
    size = len(name.encode(errors="surrogatepass"))
    if size > _MAX_NAME_BYTES:
        raise ValueError(
            f"group {name!r} is not the name of a group: it has {size} bytes; {expected}"
        )


@dataclass(frozen=True)
class Group:
    """Some ranks of the job, in ascending order."""

    name: str
    ranks: tuple[int, ...]  # world ranks of the members; a member's group rank is its position here
    rank: int  # the group rank of this process
    # The script's group, if this group was made for one of its operations.
    parent: str = field(default="", compare=False)
    # Number of the queue of an operation, in a group of two for send and receive; None where all operations of the
    # group follow one order.
    tag: int | None = field(default=None, compare=False)
    # For each member, the number of ranks whose sum it contributes; None where each stands for itself.
    counts: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def of_one_order(self) -> Group:
        """Return the group itself, or one that contains only the tag's operations."""
        if self.tag is None:
            return self
        return replace(self, name=f"{self.name}/{self.tag}", tag=None)

    @property
    def digest(self) -> int:
        """Return 64 bits that identify the group, the same on every member."""
        # ``surrogatepass``: a name may hold bytes of the command line that aren't UTF-8.
        identity = repr((self.name, self.ranks)).encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")

    @property
    def key(self) -> int:
        """Return TensorFlow's number of the group, the same on every member; it is even, so that the next one serves
        the members' GPUs.
        """
        if self.name == WORLD_GROUP:
            return _WORLD_KEY
        # Keys of other groups begin after the keys of the group of all ranks.
        return 2 * (self.digest % (1 << 29)) + 2 * _WORLD_KEY


_Made = TypeVar("_Made")


class GroupTable(dict[Group, _Made]):
    """What this rank has for each group: made at its first use, until the group is destroyed."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def of(self, group: Group, make: Callable[[Group], _Made]) -> _Made:
        """Return what there is for a group, which ``make`` makes if there is nothing yet."""
        # Two threads of a script may make the first call of a group at once.
        with self._lock:
            component = self.get(group)
            if component is None:
                component = self[group] = make(group)
            return component

    def forget(self, name: str) -> dict[Group, _Made]:
        """Drop, and return, what there is for a group that is destroyed, and for the groups made for its calls."""
        with self._lock:
            groups = [group for group in self if name in (group.name, group.parent)]
            return {group: self.pop(group) for group in groups}


def counts_of(group: Group) -> tuple[int, ...]:
    return group.counts or (1,) * group.size


def find_group(name: str, rank: int, world_size: int, groups: Mapping[str, Group]) -> Group:
    """Return the group of a name; raise ValueError if it isn't valid, or this rank has no group of that name."""
    check_group_name(name)
    if name == WORLD_GROUP:
        return Group(name, tuple(range(world_size)), rank)
    if name in groups:
        return groups[name]
    texts = [f"{WORLD_GROUP!r} (all {world_size} ranks)"]
    texts += [f"{group.name!r} (ranks {listed(group.ranks)})" for group in groups.values()]
    raise ValueError(
        f"rank {rank}: there is no group named {name!r}; expected one of the groups of this rank: {', '.join(texts)}.\n"
        "Likely cause: the group was never made here, has been destroyed, or this rank doesn't belong to it.\n"
        "What to do: call hccl.manage.api.create_group on each rank of the group, and use the group on them only."
    )


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
