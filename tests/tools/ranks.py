"""The environment of ranks in the tests."""

from __future__ import annotations

import os
from pathlib import Path

from npu_device._src.membership import rank_environment
from npu_device._src.membership.rank_environment import free_port, table_environment

__all__ = [
    "DEAD_PROXY",
    "LEAN",
    "PYTHONPATH",
    "ROOT",
    "SHORT_LIMITS",
    "all_through",
    "clean_environment",
    "free_port",
    "table_environment",
    "time_limits",
]

LEAN = str(Path(__file__).parents[1] / "lean")
"""Modules that hide installed packages of the same names, which TensorFlow and Keras import only because they are
there: pandas, scikit-learn, matplotlib and others. From start to exit, a process with TensorFlow takes 2.3 s of CPU
time instead of 5.3 s.
"""

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = f"{LEAN}{os.pathsep}{ROOT}"
"""Lets processes import the package of this tree, also where another tree is installed."""

DEAD_PROXY = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
"""A proxy at which nobody answers."""


def all_through(engine: str | None) -> dict[str, str]:
    """Return what lets all tensors of ranks on one host go through an engine; nothing for shared memory."""
    if engine in (None, "auto", "shared_memory"):
        return {}
    return {"NPU_DEVICE_BACKEND": str(engine), "NPU_DEVICE_SHARED_MEMORY": "off"}


def time_limits(**seconds: float) -> dict[str, str]:
    """Return what gives processes other limits than those of ``cluster/time_limits.py``."""
    return {
        "NPU_DEVICE_TIME_LIMITS": ",".join(f"{name}={limit}" for name, limit in seconds.items())
    }


SHORT_LIMITS = time_limits(
    MARGIN_SECONDS=1.0, MEASURED_SECONDS=0.02, UNACKNOWLEDGED_MILLISECONDS=1000
)
"""The same for all forked ranks with other limits: for each set, TensorFlow is imported once more."""


def clean_environment() -> dict[str, str]:
    """Return the environment of ranks; Python finds ``LEAN``. ``tests/gpu`` shows GPUs to its ranks."""
    path = os.pathsep.join(filter(None, (LEAN, os.environ.get("PYTHONPATH"))))
    return {**rank_environment.clean_environment(), "PYTHONPATH": path}
