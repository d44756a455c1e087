"""Groups of ranks that take part in a collective: the group of all ranks, and those that the script makes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from npu_device.cluster.runtime import Runtime

WORLD_GROUP = "hccl_world_group"
_WORLD_KEY = 2


@dataclass(frozen=True)
class Group:
    """Some ranks of the job, in ascending order.

    Attributes:
        name: as the script calls it.
        ranks: world ranks of the members; a member's group rank is its position here.
        rank: this process's group rank.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def key(self) -> int:
        """TensorFlow's number of the group, the same in every member; even, so that the next one serves the members'
        GPUs.
        """
        if self.name == WORLD_GROUP:
            return _WORLD_KEY
        checksum = zlib.crc32(repr((self.name, self.ranks)).encode())
        return 2 * (checksum % (1 << 29)) + 2 * _WORLD_KEY


def group_of(runtime: Runtime, name: str) -> Group:
    """The group of a name.

    Raises:
        ValueError: this rank knows no group of that name.
    """
    cluster = runtime.cluster
    if name == WORLD_GROUP:
        return Group(name, tuple(range(cluster.world_size)), cluster.rank)
    raise ValueError(
        f"rank {cluster.rank}: there is no group named {name!r}; expected {WORLD_GROUP!r}, the group of all "
        f"{cluster.world_size} ranks"
    )
