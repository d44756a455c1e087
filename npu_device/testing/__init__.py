"""``npu_device.testing``: test a training on real ranks; see ``docs/testing.md``. Imports no TensorFlow."""

from npu_device._src.testing import faults
from npu_device._src.testing.answers import RankError
from npu_device._src.testing.compare_ranks import equal_to_one_process, same_on_all_ranks
from npu_device._src.testing.run import run

__all__ = ["RankError", "equal_to_one_process", "faults", "run", "same_on_all_ranks"]
