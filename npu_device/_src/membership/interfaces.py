"""The network interfaces of this host: their addresses, their speeds as the driver gives them, and the choice that the
environment makes among them. Linux only.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import logging
import socket
import struct
from pathlib import Path
from typing import Union

from npu_device._src import environment
from npu_device._src.cluster.ports import is_loopback

_GET_ADDRESSES = 0x8912  # SIOCGIFCONF of linux/sockios.h
_IFREQ = struct.Struct("16s4x4s16x")  # struct ifreq with an IPv4 address, on 64-bit systems
_MOST_ADDRESSES = 1024

_Interfaces = list[tuple[str, Union[ipaddress.IPv4Address, ipaddress.IPv6Address]]]
"""Names with addresses; an interface with several addresses comes several times."""

_log = logging.getLogger("npu_device")


def announced_address() -> str | None:
    """Return what this rank announces: ``HCCL_IF_IP``, else an address of ``HCCL_SOCKET_IFNAME``; None if unset."""
    announced = environment.HCCL_IF_IP.get()
    names = environment.HCCL_SOCKET_IFNAME.get()
    if announced is not None or names is None:
        return announced
    # A link-local address means nothing without the interface, which other hosts name differently.
    global_ipv6 = [
        (name, address) for name, address in _ipv6_interfaces() if not address.is_link_local
    ]
    interfaces = _ipv4_interfaces() + global_ipv6
    # Addresses of the loopback come last: one of them is announced only if there is no other.
    for name, address in sorted(interfaces, key=lambda pair: pair[1].is_loopback):
        if _is_allowed(name, names):
            return str(address)
    listed = ", ".join(f"{name} ({address})" for name, address in interfaces) or "none"
    _log.warning(
        "HCCL_SOCKET_IFNAME is %r, and no interface of host %s with an address has such a name: this rank announces "
        "the address from which it connects. The interfaces are %s.\n"
        "What to do: name one of these (=eth0), or the beginning of several (eth), or unset the variable.",
        names,
        socket.gethostname(),
        listed,
    )
    return None


def _is_allowed(name: str, names: str) -> bool:
    """Return whether a name fits ``eth,ib`` (beginnings) or ``=eth0`` (whole names); ``^`` excludes. As in HCCL."""
    excludes = names.startswith("^")
    names = names.removeprefix("^")
    is_exact = names.startswith("=")
    names = names.removeprefix("=")
    words = [word.strip() for word in names.split(",")]
    patterns = [word for word in words if word]
    fits = name in patterns
    if not is_exact:
        fits = name.startswith(tuple(patterns))
    return excludes != fits


def is_own(address: str) -> bool:
    """Return True if an address is one of this host: the loopback has more than its interface lists."""
    return interface_of(address) is not None or is_loopback(address.partition("%")[0])


def interface_of(address: str) -> str | None:
    try:
        parsed_address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    interfaces = _ipv4_interfaces() + _ipv6_interfaces()
    # Addresses are compared by value, as one IPv6 address has several spellings.
    return next(
        (name for name, interface_address in interfaces if interface_address == parsed_address),
        None,
    )


def speed_of(interface: str) -> float | None:
    """Return the bits per second of the interface; None if its driver has no speed (loopback, many virtual ones)."""
    try:
        megabits = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):
        return None
    # A driver that doesn't know the speed gives a number below 1.
    if megabits <= 0:
        return None
    return megabits * 1e6


def _ipv4_interfaces() -> _Interfaces:
    space = array.array("B", bytes(_IFREQ.size * _MOST_ADDRESSES))
    begin, length = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", length, begin)
        used = struct.unpack("iP", fcntl.ioctl(any_socket, _GET_ADDRESSES, request))[0]
    interfaces: _Interfaces = []
    for name, packed in _IFREQ.iter_unpack(space.tobytes()[:used]):
        address = ipaddress.IPv4Address(packed)
        interfaces.append((name.rstrip(b"\0").decode(), address))
    return interfaces


def _ipv6_interfaces() -> _Interfaces:
    interfaces: _Interfaces = []
    # A host without IPv6 lacks this file.
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            interfaces.append((name, ipaddress.IPv6Address(bytes.fromhex(digits))))
    return interfaces
