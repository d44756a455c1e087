"""Who takes part in the job, where they are, and whether they are well. Floor 1: knows no tensors."""

from __future__ import annotations

from npu_device.cluster.description import Cluster
from npu_device.cluster.errors import ClusterError, PeerError, RendezvousError
from npu_device.cluster.membership import Membership, membership_from_environment, world_size_from_environment
from npu_device.cluster.rendezvous import meet

__all__ = [
    "Cluster",
    "ClusterError",
    "Membership",
    "PeerError",
    "RendezvousError",
    "meet",
    "membership_from_environment",
    "world_size_from_environment",
]
