"""The ports of the rendezvous: the one on which the chief listens, and the one kept free for this rank's TensorFlow server."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Sequence

from npu_device.cluster.description import join_address
from npu_device.cluster.errors import RendezvousError

_BACKLOG = 1024
_SELF_CONNECT_SECONDS = 5.0

_log = logging.getLogger("npu_device")


def is_loopback(host: str) -> bool:
    """True for the addresses and the name of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def plain(address: str) -> str:
    """An address as it is usually written: an IPv4 address that a dual-stack socket shows as IPv6 becomes IPv4 again."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip)


def listen(hosts: Sequence[str], port: int) -> socket.socket:
    """The chief's listening socket: on the loopback interface when all ranks are on this host, else on all interfaces.

    Args:
        hosts: addresses or names by which the ranks know the chief.
        port: the port.

    Raises:
        RendezvousError: the port is taken (Ascend's EI0019), or this process may not use it.
    """
    try:
        if all(is_loopback(host) for host in hosts):
            host = "127.0.0.1" if hosts[0] == "localhost" else hosts[0]
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        else:
            host, listener = _any_interface()
    except OSError as error:
        raise RendezvousError(f"this host has no usable network: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of an earlier run may be in TIME_WAIT
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(_cannot_listen(host, port, error)) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    where = f"{join_address(host, port)} on {socket.gethostname()}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"EI0019: the ranks are to meet at {where}, but another program uses this port.\n"
            "Likely cause: another job, or what is left of an earlier run of this one.\n"
            "What to do: end the other program, or choose another port on every rank: host_port of rank 0 in the rank table, "
            "HCCL_IF_BASE_PORT, CM_CHIEF_PORT or TF_CONFIG. npurun chooses a free one by itself."
        )
    return (
        f"the ranks are to meet at {where}, but this process can't listen there: {error.strerror}.\n"
        "What to do: choose an address of this host and a port above 1023."
    )


class ReservedPort:
    """A port of this host that the system chose for TensorFlow's server, and that it hands to nobody else.

    While the ranks meet a bound socket holds it. ``leave_to_tensorflow`` replaces that by a closed connection in TIME_WAIT:
    for about a minute the system doesn't choose the port, but an explicit bind with SO_REUSEADDR, as gRPC does it, succeeds.
    """

    def __init__(self) -> None:
        host, self._socket = _any_interface()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def leave_to_tensorflow(self) -> None:
        """Free the port for an explicit bind only."""
        try:
            self._socket.listen(8)
            self._socket.settimeout(_SELF_CONNECT_SECONDS)
            with socket.create_connection(("127.0.0.1", self.number), _SELF_CONNECT_SECONDS) as client:
                while True:
                    accepted, peer = self._socket.accept()
                    accepted.close()  # the side that closes first is the one that stays in TIME_WAIT
                    if int(peer[1]) == client.getsockname()[1]:
                        break
        except OSError as error:  # no loopback interface: the port is free all the same, only not kept so
            _log.debug("port %d could not be reserved for TensorFlow's server: %s", self.number, error)
        finally:
            self.close()

    def close(self) -> None:
        """Free the port."""
        self._socket.close()


def _any_interface() -> tuple[str, socket.socket]:
    """An unbound socket for all interfaces, IPv6 and IPv4 where both exist, and the address to bind it to."""
    if socket.has_dualstack_ipv6():
        both = socket.socket(socket.AF_INET6)
        both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return "::", both
    return "0.0.0.0", socket.socket(socket.AF_INET)
