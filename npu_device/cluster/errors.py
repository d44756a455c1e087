"""What can go wrong between the ranks. A malformed variable is a plain ValueError (``npu_device.environment``)."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """The description of the job is faulty, incomplete or contradictory, or the ranks can't work together."""


class RendezvousError(ClusterError):
    """The ranks did not find each other, or don't fit together. Every rank that came raises it with the same text."""


class PortTakenError(RendezvousError):
    """The chief can't listen, because another program uses its port."""


class PeerError(ClusterError):
    """Another rank has failed or left, and this one can't go on without it."""
