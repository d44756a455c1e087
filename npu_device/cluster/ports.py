"""The ports of the rendezvous: where the chief listens, and the one kept free for this rank's TensorFlow server."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Sequence

from npu_device.cluster.description import join_address
from npu_device.cluster.errors import PortTakenError, RendezvousError

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
    """An address without its zone; an IPv4 address that a dual-stack socket shows as IPv6 becomes IPv4 again."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip)


def listen(hosts: Sequence[str], port: int) -> socket.socket:
    """The chief's listening socket: on the loopback interface when all ranks are on this host, else on all interfaces.

    Args:
        hosts: addresses or names by which the ranks know the chief.
        port: the port.

    Raises:
        PortTakenError: another program uses the port (Ascend's EI0019).
        RendezvousError: this process can't listen there for another reason.
    """
    if all(is_loopback(host) for host in hosts):
        host = "127.0.0.1" if hosts[0] == "localhost" else hosts[0]
    else:
        host = _all_interfaces()
    listener = None
    try:
        listener = _bound(host, port)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        where = f"{join_address(host, port)} on {socket.gethostname()}"
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"EI0019: the ranks are to meet at {where}, but another program uses this port.\n"
                "Likely cause: another job, or what is left of an earlier run of this one.\n"
                "What to do: end the other program, or give every rank another port: host_port of rank 0 in the rank "
                "table, HCCL_IF_BASE_PORT, CM_CHIEF_PORT or TF_CONFIG. npurun chooses a free one by itself."
            ) from error
        raise RendezvousError(
            f"the ranks are to meet at {where}, but this process can't listen there: {error.strerror}.\n"
            "What to do: choose an address of this host and a port above 1023."
        ) from error


class ReservedPort:
    """A port of this host that the system chose for TensorFlow's server, and that it hands to nobody else.

    While the ranks meet a bound socket holds it. ``leave_to_tensorflow`` replaces that by a closed connection in
    TIME_WAIT: for about a minute the system doesn't choose the port, but an explicit bind with SO_REUSEADDR, as gRPC
    does it, succeeds.
    """

    def __init__(self) -> None:
        self._socket = _bound(_all_interfaces(), 0)
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


def _all_interfaces() -> str:
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if host == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 too
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier connection may be in TIME_WAIT
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
