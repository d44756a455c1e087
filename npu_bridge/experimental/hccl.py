"""Sizes and ranks under the names of Ascend's experimental module."""

from npu_device._src.training.distribute.groups import (
    get_rank_id as get_user_rank_id,  # noqa: F401
    get_rank_size as get_actual_rank_size,  # noqa: F401
    get_rank_size as get_user_rank_size,  # noqa: F401
)
