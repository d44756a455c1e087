"""``hccl.manage.api``: groups of ranks, their sizes and ranks."""

from npu_device._src.training.distribute.groups import (
    create_group as create_group,
    destroy_group as destroy_group,
    get_group_rank_from_world_rank as get_group_rank_from_world_rank,
    get_local_rank_id as get_local_rank_id,
    get_local_rank_size as get_local_rank_size,
    get_rank_id as get_rank_id,
    get_rank_size as get_rank_size,
    get_world_rank_from_group_rank as get_world_rank_from_group_rank,
)
