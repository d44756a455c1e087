"""Several hosts on one machine: network namespaces on a switch, with links of any chosen speed. Needs root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SWITCH = "npu_switch"
_LARGEST_COUNT = 8


def can_be_made() -> bool:
    is_root = os.geteuid() == 0
    return is_root and all(map(shutil.which, ("ip", "tc")))


@contextmanager
def hosts(count: int, gbit: float) -> Iterator[None]:
    """Create hosts for the duration of the block; each sends at most ``gbit`` Gbit/s, or without a limit if that is 0.

    The machine has a single set of them: other processes that need them wait.
    """
    with open(Path(tempfile.gettempdir()) / "npu_hosts.lock", "w") as lock:
        # A lock of a file goes with the process, however it ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Removed first, since the namespaces of a process that was killed stay.
        _remove()
        try:
            _do("ip", "netns", "add", _SWITCH)
            _do("ip", "-n", _SWITCH, "link", "add", "switch", "type", "bridge")
            _do("ip", "-n", _SWITCH, "link", "set", "switch", "up")
            for host in range(count):
                namespace = name(host)
                port = f"port{host}"
                link = ("link", "add", "eth0", "netns", namespace, "type", "veth")
                _do("ip", "netns", "add", namespace)
                _do("ip", *link, "peer", "name", port, "netns", _SWITCH)
                _do("ip", "-n", _SWITCH, "link", "set", port, "master", "switch", "up")
                _do("ip", "-n", namespace, "address", "add", f"{address(host)}/24", "dev", "eth0")
                _do("ip", "-n", namespace, "link", "set", "eth0", "up")
                _do("ip", "-n", namespace, "link", "set", "lo", "up")
                set_speed(host, gbit)
            yield
        finally:
            _remove()


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def on_host(host: int, command: list[str]) -> list[str]:
    """Return the command line that runs a command on one of the hosts."""
    return ["ip", "netns", "exec", name(host), *command]


def cut_off(host: int) -> None:
    # Without its master, the port is no part of the switch, and the link stays up, as with a
    # network that drops.
    _do("ip", "-n", _SWITCH, "link", "set", f"port{host}", "nomaster")


def connect_again(host: int) -> None:
    _do("ip", "-n", _SWITCH, "link", "set", f"port{host}", "master", "switch")


def slow_down(host: int) -> None:
    """Let a host send 500 bytes a second: packets wait, the smallest for some 0.1 s, and none is lost."""
    rate = ("rate", "4kbit", "burst", "2000", "limit", "100mb")
    _do("tc", "-n", name(host), "qdisc", "change", "dev", "eth0", "root", "tbf", *rate)


def set_speed(host: int, gbit: float) -> None:
    """Let a host send at most ``gbit`` Gbit/s from now on, beginning with the packets that wait; 0 is no limit."""
    discipline: tuple[str, ...] = ("noqueue",)
    if gbit:
        # The burst has to hold what the kernel sends at once: at 10 Gbit/s and 250 ticks a second 5 MB.
        burst = max(262_144, int(gbit * 1e9 / 8 / 250))
        discipline = (
            "tbf",
            "rate",
            f"{gbit * 1000:.0f}mbit",
            "burst",
            str(burst),
            "latency",
            "20ms",
        )
    _do("tc", "-n", name(host), "qdisc", "replace", "dev", "eth0", "root", *discipline)


def name(host: int) -> str:
    return f"npu_host{host}"


def _remove() -> None:
    for namespace in (*map(name, range(_LARGEST_COUNT)), _SWITCH):
        subprocess.run(["ip", "netns", "delete", namespace], check=False, stderr=subprocess.DEVNULL)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
