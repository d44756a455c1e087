"""``npu.errors``: the errors that a script may want to catch, under one base class, ``NpuDeviceError``.

Each is also a ``RuntimeError``, except ``CheckpointError``, which is an ``OSError``.
"""

from npu_device._src.cluster.errors import ClusterError, NpuDeviceError, PeerError, PortTakenError, RendezvousError
from npu_device._src.collectives.mismatch import MismatchError
from npu_device._src.training.checkpoint.folder import CheckpointError

__all__ = [
    "CheckpointError",
    "ClusterError",
    "MismatchError",
    "NpuDeviceError",
    "PeerError",
    "PortTakenError",
    "RendezvousError",
]
