"""What the values of npurun's options may be, and what they are by default, as platforms say it. Each function of the
first part parses one kind of value, or raises ``ArgumentTypeError``.
"""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.collectives.gpu_choice import visible_names

AUTO = "auto"  # the default of --nproc-per-node
_JOB_ID = re.compile(r"[A-Za-z0-9_-]+")


def ranks(text: str) -> int | str:
    return text if text == AUTO else count(text, 1)


def positive(text: str) -> int:
    return count(text, 1)


def count(text: str, low: int = 0) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a {'positive' if low else 'non-negative'} integer; found {text!r}")
    return int(text)


def nodes(text: str) -> tuple[int, int]:
    """Parse ``2``, or ``2:4`` for the fewest and the most nodes."""
    fewest, colon, most = text.partition(":")
    found = count(fewest, 1), count(most if colon else fewest, 1)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX")
    return found


def signal_number(text: str) -> int:
    form = environment.NPU_DEVICE_PREEMPT_SIGNAL.form
    try:
        return int(signal.Signals[form.parse(text)])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {form.expected}") from None


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def preempt_seconds(text: str) -> float:
    form = environment.NPU_DEVICE_PREEMPT_TIMEOUT.form  # the ranks get the limit in this variable
    try:
        return form.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {form.expected}") from None


def job_id(text: str) -> str:
    if not _JOB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a job id has letters, digits, '-' and '_' only")
    return text


def of_platform() -> tuple[str, dict[str, Any]]:
    """Return the options of several nodes as Kubeflow's torch runtime (``PET_*``) or else SkyPilot gives them, and the
    variable that holds the number of nodes, for messages; "" without a platform.

    The number of ranks per node is not taken from ``PET_NPROC_PER_NODE``, which is the number of CPUs there.

    Raises:
        ValueError: a variable is malformed.
    """
    most, nodes = environment.PET_NNODES.get(), environment.SKYPILOT_NUM_NODES.get()
    if most is not None:
        return environment.PET_NNODES.name, {
            "nnodes": (int((environment.PET_NNODES.raw() or "").partition(":")[0]), most),
            "node_rank": environment.PET_NODE_RANK.get(),
            "master_addr": environment.PET_MASTER_ADDR.get(),
            "master_port": environment.PET_MASTER_PORT.get(),
        }
    if nodes is None:
        return "", {}
    first = (environment.SKYPILOT_NODE_IPS.get() or "").split()[:1]
    place = {"node_rank": environment.SKYPILOT_NODE_RANK.get(), "master_addr": first[0] if first else None}
    return environment.SKYPILOT_NUM_NODES.name, {"nnodes": (nodes, nodes), **place}


def ranks_per_node() -> int:
    """Return the number of GPUs that CUDA shows to a process of this node; 1 without any.

    Asks neither TensorFlow nor the driver: CUDA_VISIBLE_DEVICES counts, or else the device files of NVIDIA.
    """
    names = visible_names(environment.CUDA_VISIBLE_DEVICES.text())
    if names is None:
        names = tuple(file.name for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    return max(1, len(names))
