"""``npu.errors``: the errors that a script may want to catch, under one base class, ``NpuDeviceError``.

Each is also a ``RuntimeError``, except ``CheckpointError``, which is an ``OSError``.
"""

from npu_device._src.cluster.rank_errors import (
    ClusterError as ClusterError,
    NpuDeviceError as NpuDeviceError,
    PeerError as PeerError,
    PortTakenError as PortTakenError,
    RendezvousError as RendezvousError,
)
from npu_device._src.collectives.call import MismatchError as MismatchError
from npu_device._src.training.checkpoint.folder import CheckpointError as CheckpointError
