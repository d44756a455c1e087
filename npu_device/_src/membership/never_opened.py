"""A warning at the end of a script that its environment makes one of several ranks, and that never opened the job."""

from __future__ import annotations

import atexit
import logging
import sys

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership import parent_rank, schemes

_log = logging.getLogger("npu_device")


def warn_at_exit() -> None:
    """Have the end of this process looked at, if its environment may make it a rank."""
    # A fork has inherited the call.
    atexit.unregister(_warn)
    if parent_rank.is_candidate():
        atexit.register(_warn)


def _warn() -> None:
    # Only a process that trains is warned, not a launcher or a tool. npurun sees the marks of all ranks, and an
    # uncaught error is what to look at first.
    trains = "tensorflow" in sys.modules and not hasattr(sys, "last_type")
    if not trains or not parent_rank.is_candidate() or environment.NPU_DEVICE_ERROR_FILE.is_set():
        return
    try:
        size = schemes.world_size_from_environment()
    except (ClusterError, ValueError):
        return
    if size > 1:
        _log.warning(
            "the environment makes this process (%s) one of %d ranks, but the script never opened npu_device: it ran "
            "alone, as an independent copy.\n"
            "What to do: add `import npu_device as npu` and `npu.open()` at the beginning of the script, "
            "and let the ranks reduce their gradients (npu.distribute.all_reduce, or NPUDistributedOptimizer in a "
            "session); or unset the variables that describe the ranks.",
            sys.argv[0] or "python",
            size,
        )
