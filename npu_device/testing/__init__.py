"""``npu_device.testing``: test a training on real ranks; see ``docs/testing.md``. Imports no TensorFlow."""

from npu_device._src.testing.answers import RankError
from npu_device._src.testing.run import run

__all__ = ["RankError", "run"]
