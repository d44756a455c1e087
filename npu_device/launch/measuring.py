"""Measure the collectives. ``npurun --tune`` runs this on every rank between two runs of the script.

``python -m npu_device.launch.measuring FILE BYTES``; rank 0 writes the cost model to FILE.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# glibc's numbers, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # the value glibc reaches by itself in a process that frees large blocks


def main() -> None:
    """Measure with all gradients together at BYTES."""
    from npu_device._src.collectives.group import WORLD_GROUP, group_of
    from npu_device._src.training import device
    from npu_device._src.tuning.measure import measure

    file, largest = Path(sys.argv[1]), int(sys.argv[2])
    _keep_memory()
    device.open()
    runtime = device.cluster_runtime()
    if runtime is None:
        sys.exit("there is nothing to measure with a single rank")
    cost = measure(runtime, group_of(runtime, WORLD_GROUP), largest)
    if runtime.cluster.rank == 0:
        cost.write(file)


def _keep_memory() -> None:
    """Keep memory instead of returning it to the system after each collective. A training process allocates so much
    else that it keeps its memory, too.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


if __name__ == "__main__":
    main()
