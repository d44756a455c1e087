"""All ranks meet once, at the chief's address, and agree on one description of the job; the same for every scheme.

``chief`` and ``visitor`` are the two sides of it. What TensorFlow makes of the result is ``runtime``'s part.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
from collections.abc import Mapping

from npu_device import __version__
from npu_device.cluster import protocol
from npu_device.cluster.chief import Chief
from npu_device.cluster.description import Cluster
from npu_device.cluster.errors import PortTakenError
from npu_device.cluster.membership import Membership
from npu_device.cluster.ports import ReservedPort
from npu_device.cluster.protocol import Hello, Picture
from npu_device.cluster.visitor import Visitor

# The names under which TensorFlow is installed.
_TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tf-nightly",
    "tf-nightly-cpu",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-rocm",
    "tensorflow-aarch64",
    "tensorflow-cpu-aws",
)

_log = logging.getLogger("npu_device")


def meet(membership: Membership, versions: Mapping[str, str] | None = None) -> Cluster:
    """Wait for all ranks of the job and agree with them.

    Args:
        membership: this process's place in the job.
        versions: versions that have to be the same on every rank, by name; default those of npu_device and TensorFlow.

    Returns:
        The description of the job, the same on every rank but for the rank's own place. The port in this rank's address
        is free, and the system gives it to nobody else for about a minute.

    Raises:
        RendezvousError: within ``connect_timeout`` the ranks did not all come, don't fit together, or this one did not
            find the chief; the chief's port is taken. All ranks that came get the same text, with a line for each rank.
    """
    port = ReservedPort()
    try:
        hello = Hello(
            job_id=membership.job_id,
            scheme=membership.scheme,
            world_size=membership.world_size,
            rank=membership.rank,
            device_id=membership.device_id,
            host_key=membership.host_key,
            host=membership.host,
            port=port.number,
            versions={"protocol": protocol.PROTOCOL_VERSION, **(versions or installed_versions())},
            machine=socket.gethostname(),
            pid=os.getpid(),
        )
        if membership.is_chief:
            picture = _be_chief(membership, hello)
        else:
            picture = Visitor(membership, hello).visit()
        port.leave_to_tensorflow()
    finally:
        port.close()
    cluster = Cluster.seen_by(picture.rank, membership.device_id, picture.hosts, picture.addresses, membership.job_id)
    _log.info("rank %d of %d has met the others: %s", cluster.rank, cluster.world_size, ", ".join(cluster.addresses))
    return cluster


def _be_chief(membership: Membership, hello: Hello) -> Picture:
    try:
        chief = Chief(membership, hello)
    except PortTakenError:
        # Perhaps by a second process that was started as the chief: then every rank is to hear of it.
        Visitor(membership, hello).knock()
        raise
    with chief:
        return chief.gather()


def installed_versions() -> dict[str, str]:
    """Versions of npu_device and TensorFlow, without importing TensorFlow."""
    tensorflow = "unknown"
    for name in _TENSORFLOWS:
        try:
            tensorflow = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"npu_device": __version__, "tensorflow": tensorflow}
