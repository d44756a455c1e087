"""Groups of ranks that take part in a collective. The group of all ranks is the only one there is."""

from __future__ import annotations

from npu_device.cluster.runtime import Runtime

WORLD_GROUP = "hccl_world_group"


def group_size(runtime: Runtime, group: str) -> int:
    """The number of ranks in a group.

    Raises:
        ValueError: there is no group of that name.
    """
    if group != WORLD_GROUP:
        raise ValueError(
            f"rank {runtime.cluster.rank}: there is no group named {group!r}; found this name in the `group` argument, "
            f"expected {WORLD_GROUP!r}, the group of all {runtime.cluster.world_size} ranks"
        )
    return runtime.cluster.world_size
