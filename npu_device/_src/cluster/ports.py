"""Addresses and listening ports: those of the hub and the ranks, and those reserved for TensorFlow's servers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Sequence

from npu_device._src.cluster.rank_errors import PortTakenError, RendezvousError

_BACKLOG = 1024


def allow_many_descriptors() -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def plain(address: str) -> str:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def addresses_of_this_host() -> list[str]:
    """Return addresses at which other hosts may reach this one, the best guess first; no loopback address."""
    addresses = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A datagram socket sends nothing here: the kernel only chooses the interface of the default route.
        probe.connect(("192.0.2.1", 9))
        addresses.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses += [str(address[0]) for *_, address in infos]
    return [address for address in dict.fromkeys(addresses) if not is_loopback(address)]


def join_address(host: str, port: int) -> str:
    # An IPv6 address gets brackets.
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"


def reached_at(listener: socket.socket) -> str:
    """Return an address at which this host can connect to a listener."""
    host = str(listener.getsockname()[0])
    # An address that means all interfaces can't be connected to.
    if host in ("::", "0.0.0.0"):
        return "127.0.0.1"
    return host


def listen(hosts: Sequence[str], ports: Sequence[int]) -> socket.socket:
    """Return the listening socket of the hub; PortTakenError (Ascend's EI0019) or RendezvousError if there is none."""
    lowest, highest = ports
    where = f"{join_address(_interface(hosts), lowest)} on {socket.gethostname()}"
    try:
        return listen_on_free(ports, hosts)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            state = "another program uses this port"
            remedy = (
                "choose another port: npurun --master-port; without npurun, the same for every rank, host_port of rank "
                "0 in the rank table, HCCL_IF_BASE_PORT, CM_CHIEF_PORT, TF_CONFIG or MASTER_PORT"
            )
            if highest > lowest:
                state = f"other programs use this port and the next ones up to {highest}"
                remedy = "let NPU_DEVICE_PORT_RANGE have more ports"
            raise PortTakenError(
                f"EI0019: the ranks are to meet at {where}, but {state}.\n"
                "Likely cause: another job, or a process left over from an earlier run of this one.\n"
                f"What to do: end the other program, or {remedy}."
            ) from error
        raise RendezvousError(
            f"the ranks are to meet at {where}, but this process can't listen there: {error.strerror}.\n"
            "What to do: choose an address of this host and a port above 1023."
        ) from error


def listen_on_free(ports: Sequence[int] | None = None, hosts: Sequence[str] = ()) -> socket.socket:
    """Return a socket on a free port of a range, by default any; on the loopback if all hosts are; or raise OSError."""
    lowest, highest = ports or (0, 0)
    count = highest - lowest + 1
    # Concurrent processes begin to look at different ports.
    begin = os.getpid() % count
    for offset in range(count):
        try:
            return _bound_at(_interface(hosts), lowest + (begin + offset) % count)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or offset == count - 1:
                raise
    raise AssertionError("an empty range")


class ReservedPort:
    """A port for the server of somebody else: until ``close`` the system gives it to nobody who doesn't ask for it."""

    def __init__(self, ports: Sequence[int] | None = None) -> None:
        if ports:
            # Other ranks try the ports of a range one by one, so that this one has to listen while they do.
            self._socket = listen_on_free(ports)
        else:
            self._socket = _bound_at(_interface(()), 0, listens=False)
        self.number = int(self._socket.getsockname()[1])

    def leave_to_server(self) -> None:
        """Let a server bind the port explicitly, with SO_REUSEADDR as gRPC and the hub do."""
        # A reserved port may not listen yet.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _interface(hosts: Sequence[str]) -> str:
    """Return the address to listen at so that the hosts can reach this one: that of the loopback, or all."""
    if hosts and all(map(is_loopback, hosts)):
        if hosts[0] == "localhost":
            return "127.0.0.1"
        return hosts[0]
    if socket.has_dualstack_ipv6():
        return "::"
    return "0.0.0.0"


def _bound_at(host: str, port: int, listens: bool = True) -> socket.socket:
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    bound = socket.socket(family)
    try:
        if host == "::":
            # The socket is set to take IPv4, too.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Bound although an earlier connection of the port may still be in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        if listens:
            # With SO_REUSEADDR, two processes can bind the same port. Only one can listen.
            bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound
