"""Groups of ranks for scripts: create and destroy them, query sizes and ranks (Ascend's ``hccl.manage.api``).

The functions act for the calling process: a rank of the running job, which is opened now if the script hasn't done so;
or a single device, which behaves as a job of one rank. Nothing is sent, and no rank waits.

Source: Ascend HCCL, Python API for group and rank management.
"""

from __future__ import annotations

from typing import Any

from npu_device._src import compat
from npu_device._src.cluster.description import Cluster, ParentRank
from npu_device._src.collectives.group import (
    WORLD_GROUP,
    Group,
    check_group_name,
    find_group,
    listed,
)
from npu_device._src.training.opening import device
from npu_device._src.wording import counted

_SINGLE = ParentRank(pid=0, rank=0, world_size=1, neighbours=[0], device_id=0)
"""What a single device knows of itself."""

_alone: dict[str, Group] = {}
"""The groups that a script has made on a single device, or in a child of a rank, where there is no job."""


@compat.do_not_convert
def create_group(group: str, rank_num: int, rank_ids: list[int]) -> None:
    """Create a group from some of the ranks of the job; each member makes the same call before it uses the group.

    Args:
        group: its name, 1 to 127 bytes. Disjoint sets of ranks may use one name for a group each.
        rank_num: number of ranks in the group.
        rank_ids: the members' world ranks, a list in any order; group ranks count them in ascending order.

    Raises:
        ValueError: an argument of another type or out of range; ``rank_num`` isn't the number of ``rank_ids``; a rank
            twice; the calling rank is not among them; the name is in use.
        RuntimeError: the environment names several ranks but the job can't be joined any more; so does each call here.
    """
    check_group_name(group)
    rank = process().rank
    world_size = process().world_size
    where = f"rank {rank}, create_group({group!r}): "
    if group == WORLD_GROUP:
        raise ValueError(
            f"{where}this is the group of all {world_size} ranks, which exists; expected another name"
        )
    if not isinstance(rank_num, int) or rank_num < 1:
        raise ValueError(f"{where}rank_num is {rank_num!r}; expected a whole number from 1")
    if not isinstance(rank_ids, list):
        type_name = type(rank_ids).__name__
        raise ValueError(
            f"{where}rank_ids is {rank_ids!r}, a {type_name}; expected a list of world ranks"
        )
    if len(rank_ids) != rank_num:
        raise ValueError(
            f"{where}rank_ids {rank_ids} has {len(rank_ids)} entries; expected {rank_num} (rank_num)"
        )
    for position, member in enumerate(rank_ids):
        if not isinstance(member, int) or not 0 <= member < world_size:
            raise ValueError(
                f"{where}rank_ids[{position}] is {member!r}; expected a world rank, a whole number from 0 to "
                f"{world_size - 1}"
            )
    # Group ranks count in ascending order, whatever the order of the list.
    members = tuple(sorted(int(member) for member in rank_ids))
    if len(set(members)) < rank_num:
        doubled = sorted({member for member in members if members.count(member) > 1})
        raise ValueError(
            f"{where}rank_ids {rank_ids} names {listed(doubled)} more than once; expected each rank once"
        )
    if rank not in members:
        raise ValueError(
            f"{where}rank {rank} is not among rank_ids {rank_ids}; expected a group to which the calling rank "
            "belongs.\nWhat to do: let each rank make only the groups that it is a member of."
        )
    # Registered after all checks, so that a refused call leaves nothing.
    groups = _own_groups()
    if group in groups:
        raise ValueError(
            f"{where}this name belongs to the group of rank(s) {listed(groups[group].ranks)}; expected another "
            "one.\nWhat to do: make each group once, or call destroy_group first."
        )
    groups[group] = Group(group, members, members.index(rank))


@compat.do_not_convert
def destroy_group(group: str) -> None:
    """Free a group on the calling rank; its name can be used again.

    Functions that have been traced with the group fail when they are called again. Every member has to destroy the
    group before any of them creates another one of the same name and ranks.

    Args:
        group: name of a group that ``create_group`` has made.

    Raises:
        ValueError: the group of all ranks, or no group of that name.
    """
    if _find(group).name == WORLD_GROUP:
        raise ValueError(
            f"rank {process().rank}, destroy_group({group!r}): the group of all ranks can't be destroyed"
        )
    job = device.unless_child()
    if job is None:
        del _own_groups()[group]
    else:
        job.forget_group(group)


@compat.do_not_convert
def get_rank_size(group: str = WORLD_GROUP) -> int:
    """Return the number of ranks in a group; 1 on a single device.

    Args:
        group: name of the group, default the group of all ranks.

    Raises:
        ValueError: no group of that name on this rank.

    >>> get_rank_size()  # a single device
    1
    """
    return _find(group).size


@compat.do_not_convert
def get_local_rank_size(group: str = WORLD_GROUP) -> int:
    """Return the number of ranks of the group on the host of the caller; 1 on a single device.

    Args:
        group: name of the group, default the group of all ranks.

    Raises:
        ValueError: no group of that name on this rank.
    """
    return len(_neighbours(group))


@compat.do_not_convert
def get_rank_id(group: str = WORLD_GROUP) -> int:
    """Return the rank of this process in a group; 0 on a single device.

    Args:
        group: name of the group, default the group of all ranks.

    Raises:
        ValueError: no group of that name on this rank.

    >>> get_rank_id()  # a single device
    0
    """
    return _find(group).rank


@compat.do_not_convert
def get_local_rank_id(group: str = WORLD_GROUP) -> int:
    """Return the index of this rank, from 0, among the ranks of the group on its host; 0 on a single device.

    Args:
        group: name of the group, default the group of all ranks.

    Raises:
        ValueError: no group of that name on this rank.
    """
    return _neighbours(group).index(_find(group).rank)


@compat.do_not_convert
def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    """Return the world rank of the member of a group.

    Args:
        group: name of the group.
        group_rank_id: the rank of the member in the group.

    Raises:
        ValueError: no group of that name on this rank; the group has no such rank.
    """
    found_group = _find(group)
    _check_rank("group_rank_id", group_rank_id)
    if group_rank_id >= found_group.size:
        raise ValueError(
            f"group_rank_id is {group_rank_id}; expected a rank from 0 to {found_group.size - 1}, "
            f"since group {group!r} has {counted(found_group.size, 'member')}: world rank(s) "
            f"{listed(found_group.ranks)}"
        )
    return found_group.ranks[group_rank_id]


@compat.do_not_convert
def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    """Return the group rank of one of the ranks of the job.

    Args:
        world_rank_id: a world rank.
        group: name of the group. The arguments have Ascend's order.

    Raises:
        ValueError: no group of that name on this rank; the rank is not a member.
    """
    found_group = _find(group)
    _check_rank("world_rank_id", world_rank_id)
    if world_rank_id not in found_group.ranks:
        raise ValueError(
            f"world_rank_id is {world_rank_id}; expected a member of group {group!r}: world rank(s) "
            f"{listed(found_group.ranks)}"
        )
    return found_group.ranks.index(world_rank_id)


def process() -> Cluster | ParentRank:
    """Return what knows rank and size: the rank whose child this is, else the running cluster, or a single device."""
    return device.cluster_or_parent() or _SINGLE


def _own_groups() -> dict[str, Group]:
    job = device.unless_child()
    if job is None:
        return _alone
    return job.groups


def _find(name: str) -> Group:
    return find_group(name, process().rank, process().world_size, _own_groups())


def _neighbours(name: str) -> list[int]:
    """Return the group ranks of the members on this host."""
    neighbours = process().neighbours
    members = _find(name).ranks
    return [rank for rank, world_rank in enumerate(members) if world_rank in neighbours]


def _check_rank(argument: str, rank: Any) -> None:
    if not isinstance(rank, int) or rank < 0:
        raise ValueError(f"{argument} is {rank!r}; expected a rank, a whole number from 0")
