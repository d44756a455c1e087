"""Ascend's scheme without a rank table: the variables ``CM_CHIEF_*`` and ``CM_WORKER_*``.

The hub numbers the ranks when all have come; see ``roster``.

Source: Ascend environment variables reference, CM_CHIEF_IP and the following pages.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError


@dataclass(frozen=True)
class TableFree:
    """This process's place in the scheme.

    Attributes:
        chief_ip: address of the chief's host.
        chief_port: port the chief listens on.
        is_chief: True if this process is the chief.
        worker_ip: address of this process's host, if known before the rendezvous.
    """

    chief_ip: str
    chief_port: int
    is_chief: bool
    worker_ip: str | None


def read(device_id: int) -> TableFree:
    """Return this process's place according to the variables.

    Args:
        device_id: number of this process's device on its host; host and device together identify the chief.

    Raises:
        ClusterError: a variable is missing.
        ValueError: a variable is malformed, or IPv4 and IPv6 are mixed.
    """
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
    return TableFree(chief_ip, chief_port, on_chief_host and device_id == chief_device, worker_ip)


def _is_local(ip: str) -> bool:
    """Return True if the address is one of this host's: only those can be bound."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
