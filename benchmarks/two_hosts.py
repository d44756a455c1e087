"""Two hosts on one machine: network namespaces joined by a veth pair as slow as one likes. Needs root, ip and tc."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMESPACES = ("npu_host0", "npu_host1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def can_be_made() -> bool:
    """Whether this process may make them."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextmanager
def two_hosts() -> Iterator[None]:
    """The hosts exist while the block runs."""
    _remove()
    try:
        for name in NAMESPACES:
            _do("ip", "netns", "add", name)
        first, second = NAMESPACES
        _do("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(NAMESPACES, ADDRESSES):
            _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _remove()


def on_host(host: int, command: list[str]) -> list[str]:
    """The command line that runs a command on one of the hosts."""
    return ["ip", "netns", "exec", NAMESPACES[host], *command]


def sent_bytes(host: int) -> int:
    """How much a host has sent to the other one since they were made."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(subprocess.run(on_host(host, ["cat", path]), check=True, capture_output=True, text=True).stdout)


def shape(gbit: float) -> None:
    """Hold the link to so many Gbit/s in each direction."""
    # The burst has to hold what the kernel sends at once: at 10 Gbit/s and 250 ticks a second 5 MB.
    burst = max(262_144, int(gbit * 1e9 / 8 / 250))
    for name in NAMESPACES:
        rate = ("rate", f"{gbit * 1000:.0f}mbit", "burst", str(burst), "latency", "20ms")
        _do("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)


def _remove() -> None:
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
