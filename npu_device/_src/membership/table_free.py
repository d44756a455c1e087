"""Ascend's scheme without a rank table: the variables ``CM_CHIEF_*`` and ``CM_WORKER_*``.

The hub numbers the ranks when all have come; see ``roster``.

Source: Ascend environment variables reference, CM_CHIEF_IP and the following pages.
"""

from __future__ import annotations

import socket

from npu_device._src import environment
from npu_device._src.cluster.description import Membership
from npu_device._src.cluster.errors import ClusterError


def read(size: int, device_id: int) -> Membership:
    """Return the place of this process according to the variables."""
    required = (
        environment.CM_CHIEF_IP,
        environment.CM_CHIEF_PORT,
        environment.CM_CHIEF_DEVICE,
        environment.CM_WORKER_SIZE,
    )
    missing = [variable.name for variable in required if not variable.is_set()]
    if missing:
        names = ", ".join(missing)
        raise ClusterError(
            f"{names} {'is' if len(missing) == 1 else 'are'} missing or empty: CM_CHIEF_IP, CM_CHIEF_PORT, "
            "CM_CHIEF_DEVICE and CM_WORKER_SIZE together describe a job without a rank table "
            "(RANK_SIZE belongs to one with a table).\n"
            f"What to do: set {names} on every rank, with the same value everywhere."
        )
    chief_ip, worker_ip = environment.CM_CHIEF_IP.get(), environment.CM_WORKER_IP.get()
    chief_port, chief_device = environment.CM_CHIEF_PORT.get(), environment.CM_CHIEF_DEVICE.get()
    assert chief_ip is not None and chief_port is not None
    if worker_ip is not None and (":" in worker_ip) != (":" in chief_ip):
        raise ValueError(
            f"EI0001: the environment variable CM_WORKER_IP is {worker_ip!r} and CM_CHIEF_IP is {chief_ip!r}; "
            "expected addresses of one family, IPv4 or IPv6.\n"
            "What to do: give both in the family that the hosts use to reach each other."
        )
    on_chief_host = worker_ip == chief_ip if worker_ip is not None else _is_local(chief_ip)
    is_chief = on_chief_host and device_id == chief_device
    host = worker_ip or (chief_ip if is_chief else None)
    return Membership(
        scheme="CM_*",
        world_size=size,
        rank=None,
        host=host,
        host_key=host or "",
        device_id=device_id,
        is_chief=is_chief,
        chief_hosts=(chief_ip,),
        chief_port=chief_port,
    )


def _is_local(ip: str) -> bool:
    """Return True if this host has the address: only those can be bound."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
