"""``npu_device.compat.v1``: ``SessionConfigBuilder``, and every module of ``npu_bridge`` once more.

The modules below are those in the directory of ``npu_bridge``, loaded under this name. They hold only imports, so that
both names lead to the same functions and classes.
"""

import npu_bridge
from npu_device._src.tf1.config import SessionConfigBuilder as SessionConfigBuilder

__path__ = [*__path__, *npu_bridge.__path__]
