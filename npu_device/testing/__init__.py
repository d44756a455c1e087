"""``npu_device.testing``: test a training on real ranks; see ``docs/testing.md``. Imports no TensorFlow."""

from npu_device._src.pools.answers import RankError as RankError
from npu_device._src.testing import faults as faults
from npu_device._src.testing.compare_ranks import (
    equal_to_one_process as equal_to_one_process,
    same_on_all_ranks as same_on_all_ranks,
)
from npu_device._src.testing.run import run as run
