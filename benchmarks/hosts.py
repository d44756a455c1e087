"""Several hosts on one machine: network namespaces on a switch, with links as slow as one likes. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH = "npu_switch"
_MOST = 8


def can_be_made() -> bool:
    """Whether this process may make them."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextmanager
def hosts(count: int, gbit: float) -> Iterator[None]:
    """The hosts exist while the block runs; each sends ``gbit`` Gbit/s at most."""
    _remove()
    try:
        _do("ip", "netns", "add", _SWITCH)
        _do("ip", "-n", _SWITCH, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", _SWITCH, "link", "set", "switch", "up")
        for host in range(count):
            name, port = _name(host), f"port{host}"
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", _SWITCH)
            _do("ip", "-n", _SWITCH, "link", "set", port, "master", "switch", "up")
            _do("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _shape(name, gbit)
        yield
    finally:
        _remove()


def address(host: int) -> str:
    """A host's IP address."""
    return f"10.77.0.{host + 1}"


def on_host(host: int, command: list[str]) -> list[str]:
    """The command line that runs a command on one of the hosts."""
    return ["ip", "netns", "exec", _name(host), *command]


def _name(host: int) -> str:
    return f"npu_host{host}"


def _shape(name: str, gbit: float) -> None:
    # The burst has to hold what the kernel sends at once: at 10 Gbit/s and 250 ticks a second 5 MB.
    burst = max(262_144, int(gbit * 1e9 / 8 / 250))
    rate = ("rate", f"{gbit * 1000:.0f}mbit", "burst", str(burst), "latency", "20ms")
    _do("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)


def _remove() -> None:
    for name in (*map(_name, range(_MOST)), _SWITCH):
        subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
