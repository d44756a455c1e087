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

from npu_device._src import environment

_GET_ADDRESSES = 0x8912  # SIOCGIFCONF of linux/sockios.h
_ENTRY = struct.Struct("16s4x4s16x")  # struct ifreq with an IPv4 address, on 64-bit systems
_MOST = 1024  # addresses

_log = logging.getLogger("npu_device")


def announced_address() -> str | None:
    """Return what this rank announces: ``HCCL_IF_IP``, else an address of ``HCCL_SOCKET_IFNAME``; None if unset."""
    given, names = environment.HCCL_IF_IP.get(), environment.HCCL_SOCKET_IFNAME.get()
    if given is not None or names is None:
        return given
    interfaces: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = [*_ipv4()]
    interfaces += [(name, address) for name, address in _ipv6() if not address.is_link_local]
    for name, address in sorted(interfaces, key=lambda one: one[1].is_loopback):
        if _is_allowed(name, names):
            return str(address)
    _log.warning(
        "HCCL_SOCKET_IFNAME is %r, and no interface of host %s with an address has such a name: this rank announces "
        "the address from which it connects. The interfaces are %s.\n"
        "What to do: name one of these (=eth0), or the beginning of several (eth), or unset the variable.",
        names,
        socket.gethostname(),
        ", ".join(f"{name} ({address})" for name, address in interfaces) or "none",
    )
    return None


def _is_allowed(name: str, names: str) -> bool:
    """Return whether a name fits ``eth,ib`` (beginnings) or ``=eth0`` (whole names); ``^`` excludes. As in HCCL."""
    excludes, names = names.startswith("^"), names.removeprefix("^")
    whole, names = names.startswith("="), names.removeprefix("=")
    listed = [each.strip() for each in names.split(",") if each.strip()]
    return excludes != (name in listed if whole else name.startswith(tuple(listed)))


def interface_of(address: str) -> str | None:
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    found = _ipv4() if wanted.version == 4 else _ipv6()
    return next((name for name, own in found if own == wanted), None)


def speed_of(interface: str) -> float | None:
    """Return the bits per second of the interface; None if its driver has no speed (loopback, many virtual ones)."""
    try:
        megabits = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 if megabits > 0 else None


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address]]:
    space = array.array("B", bytes(_ENTRY.size * _MOST))
    begin, length = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", length, begin)
        used = struct.unpack("iP", fcntl.ioctl(any_socket, _GET_ADDRESSES, request))[0]
    entries = _ENTRY.iter_unpack(space.tobytes()[:used])
    return [(name.rstrip(b"\0").decode(), ipaddress.IPv4Address(packed)) for name, packed in entries]


def _ipv6() -> list[tuple[str, ipaddress.IPv6Address]]:
    found = []
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found
