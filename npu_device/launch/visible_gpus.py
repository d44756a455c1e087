"""How many ranks a node gets by default: one per visible GPU, or one."""

from __future__ import annotations

import re
from pathlib import Path

from npu_device._src import environment
from npu_device._src.collectives.gpu_choice import visible_names

AUTO = "auto"
"""The default of ``--nproc-per-node``."""


def ranks_per_node() -> int:
    """Return the number of GPUs that CUDA shows to a process of this node; 1 without any.

    Asks neither TensorFlow nor the driver: CUDA_VISIBLE_DEVICES counts, or else NVIDIA's device files.
    """
    names = visible_names(environment.CUDA_VISIBLE_DEVICES.text())
    if names is None:
        names = tuple(file.name for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    return max(1, len(names))
