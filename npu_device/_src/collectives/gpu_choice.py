"""Choose the GPU of a rank, and decide whether all GPUs can use NCCL. Calls neither TensorFlow nor CUDA: environment
and devices come in, decisions come out. ``resources`` applies them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")
_SHOWN_HOSTS = 8

UNVERIFIED = "unverified between GPUs: it has run only between two ranks on one GPU"
"""The remark on NCCL in statements."""


@dataclass(frozen=True)
class Device:
    """The device of a rank, as it tells the other ranks. Serializable as JSON."""

    name: str  # "GPU 0", or the UUID in ``CUDA_VISIBLE_DEVICES``; "CPU"
    detail: str = ""  # the model, such as "NVIDIA H100 80GB HBM3"; for a CPU, why the rank has no GPU; "" if unknown
    unit: str = ""  # identifies the GPU or MIG instance on the host; "" for a CPU
    chip: str = ""  # identifies the GPU to which the unit belongs; the unit itself without MIG
    has_nccl: bool = False  # TensorFlow can use NCCL

    @property
    def is_gpu(self) -> bool:
        return bool(self.unit)


def visible_names(cuda: str | None) -> tuple[str, ...] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that count; None if the variable is unset, and CUDA shows all.

    CUDA ignores everything from the first malformed entry on.
    """
    if cuda is None:
        return None
    return tuple(itertools.takewhile(_ENTRY.fullmatch, map(str.strip, cuda.split(","))))


def own_instance(cuda: str | None, nvidia: str | None, device_id: int) -> str | None:
    """Return the MIG instance to which ``CUDA_VISIBLE_DEVICES`` has to be set for a rank; None to leave it.

    CUDA shows a process only the first MIG instance in the list. A container has those in ``NVIDIA_VISIBLE_DEVICES``.
    """
    # Containers get their GPUs by NVIDIA's variable, and CUDA's counts among those.
    names = visible_names(nvidia if cuda is None else cuda) or ()
    if len(names) < 2 or not all(name.startswith("MIG-") for name in names):
        return None
    # A launcher may number the ranks of a host beyond its instances, which then share them in turn.
    return names[device_id % len(names)]


def name_of(cuda: str | None, index: int) -> str:
    """Return the name of the GPU that CUDA shows under a number."""
    names = visible_names(cuda) or ()
    if index < len(names):
        name = names[index]
    else:
        name = str(index)
    if name.isdigit():
        return f"GPU {name}"
    return name


def why_none(cuda: str | None, nvidia: str | None) -> str:
    """Return why TensorFlow sees no GPU."""
    if cuda is not None and not visible_names(cuda):
        return f"CUDA_VISIBLE_DEVICES is {cuda!r}"
    if nvidia in ("none", "void"):
        return f"NVIDIA_VISIBLE_DEVICES is {nvidia!r}"
    return "TensorFlow sees no GPU"


def sharing(
    devices: Sequence[Device], hosts: Sequence[str], *, chips: bool = False
) -> list[list[int]]:
    """Return the lists of two or more ranks that use one GPU or MIG instance; with ``chips``, one GPU."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (device, host) in enumerate(zip(devices, hosts)):
        if device.is_gpu:
            # Two MIG instances are two units of one chip.
            unit = device.unit
            if chips:
                unit = device.chip
            users.setdefault((host, unit), []).append(rank)
    return [ranks for ranks in users.values() if len(ranks) > 1]


def why_no_nccl(devices: Sequence[Device], hosts: Sequence[str], engine: str) -> str:
    """Return why floating-point tensors don't go through NCCL; "" if they do. The same on all ranks.

    NCCL refuses two ranks on one GPU, also on two MIG instances of it.
    """
    without = [rank for rank, device in enumerate(devices) if not device.is_gpu]
    if len(without) == len(devices):
        return "no rank has a GPU"
    if engine in ("tensorflow", "mpi", "tcp"):
        return f"NPU_DEVICE_BACKEND is {engine}"
    if without:
        return f"rank {without[0]} has no GPU"
    shared = sharing(devices, hosts, chips=True)
    if shared:
        ranks = ", ".join(map(str, shared[0]))
        return f"ranks {ranks} share a GPU of host {hosts[shared[0][0]]}"
    lacking = [rank for rank, device in enumerate(devices) if not device.has_nccl]
    if lacking:
        return f"the TensorFlow of rank {lacking[0]} is built without NCCL"
    return ""


def statement(devices: Sequence[Device], hosts: Sequence[str], no_nccl: str) -> list[str]:
    """Return the lines that say which rank has which device, one per host; none in a job without GPUs."""
    if not any(device.is_gpu for device in devices):
        return []
    way = f"NCCL ({UNVERIFIED})"
    if no_nccl:
        way = f"host memory ({no_nccl})"
    lines = [f"npu_device: {len(devices)} ranks; floating-point tensors go through {way}"]
    shared = {rank for ranks in sharing(devices, hosts) for rank in ranks}
    by_host: dict[str, list[str]] = {}
    for rank, (device, host) in enumerate(zip(devices, hosts)):
        line = f"rank {rank}: {device.name}"
        if device.detail:
            line += f" ({device.detail})"
        if rank in shared:
            line += ", shared, memory grows as needed"
        by_host.setdefault(host, []).append(line)
    for host, ranks in list(by_host.items())[:_SHOWN_HOSTS]:
        lines.append(f"  host {host}: {'; '.join(ranks)}")
    if len(by_host) > _SHOWN_HOSTS:
        lines.append(f"  and {len(by_host) - _SHOWN_HOSTS} more hosts")
    return [*lines, "  (NPU_DEVICE_STATEMENT=off leaves this out)"]
