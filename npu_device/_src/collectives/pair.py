"""A group of the two ranks of a send and its receive: TensorFlow has no operation for two ranks, but a
broadcast in a group of two is one.

The pair serves both directions and all tags. Transfers with different tags can't be mixed up, whatever order the two
sides call them in.
"""

from __future__ import annotations

from npu_device._src.collectives import shapes
from npu_device._src.collectives.group import Group

_TAGS = 1 << 61


def pair_of(group: Group, source: int, destination: int, tag: int) -> Group:
    """Return the group of a transfer.

    Raises:
        ValueError: a rank isn't in the group, or both are the same; the tag doesn't fit into 62 bits.
    """
    shapes.require_member("src_rank", source, group)
    shapes.require_member("dest_rank", destination, group)
    if source == destination:
        raise ValueError(
            f"group rank {source} of {group.name!r} can't exchange data with itself; expected another rank of 0 to "
            f"{group.size - 1}"
        )
    if not -_TAGS <= tag < _TAGS:
        raise ValueError(f"tag {tag} is too large; expected a whole number from {-_TAGS} to {_TAGS - 1}")
    me = group.ranks[group.rank]
    ranks = tuple(sorted((group.ranks[source], group.ranks[destination])))
    upwards = source < destination
    tag = 2 * tag + upwards
    return Group(f"{group.name}/{ranks[0]}-{ranks[1]}", ranks, ranks.index(me), group.name, tag)
