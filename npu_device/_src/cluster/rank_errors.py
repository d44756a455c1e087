"""Errors between the ranks, and the exit code of a rank that was asked to stop."""

from __future__ import annotations

import os
from typing import Any

RESUMABLE: int = os.EX_TEMPFAIL
"""Exit code 75: the rank was asked to stop, and a checkpoint has been written from which the job can go on."""


class NpuDeviceError(Exception):
    """Base class of the errors that a script may want to catch; see ``npu_device.errors``."""


class ClusterError(NpuDeviceError, RuntimeError):
    """The description of the job is wrong, incomplete or contradictory, or the ranks can't work together."""


class RendezvousError(ClusterError):
    """The ranks did not find each other, or don't match. Every rank that came raises it with the same text."""


class ChildOfRankError(ClusterError):
    """This process is no rank: one of its ancestors is the rank (``parent``) whose variables it has."""

    def __init__(self, parent: Any) -> None:
        super().__init__(f"this process is a child of rank {parent.rank}")
        self.parent = parent


class PortTakenError(RendezvousError):
    """The hub can't listen, because another program uses its port."""


class PeerError(ClusterError):
    """Another rank, or the hub, has failed or left or can't be reached, and this rank can't continue without it."""
