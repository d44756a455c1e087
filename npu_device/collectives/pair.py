"""The two ranks of a send and its receive, as a group of their own: TensorFlow has no operation for two ranks, but a
broadcast in a group of two is one.

Each direction and tag is another group, whose operations are counted by themselves: transfers with different tags
can't be mixed up, whatever order the two sides call them in.
"""

from __future__ import annotations

from npu_device.collectives import shapes
from npu_device.collectives.group import Group


def pair_of(group: Group, source: int, destination: int, tag: int) -> Group:
    """The group of a transfer.

    Raises:
        ValueError: a rank isn't in the group, or both are the same.
    """
    shapes.require_member("src_rank", source, group)
    shapes.require_member("dest_rank", destination, group)
    if source == destination:
        raise ValueError(
            f"group rank {source} of {group.name!r} can't exchange data with itself; expected another rank of 0 to "
            f"{group.size - 1}"
        )
    me = group.ranks[group.rank]
    ranks = tuple(sorted((group.ranks[source], group.ranks[destination])))
    return Group(f"{group.name}/{source}->{destination}/{tag}", ranks, ranks.index(me))
