"""A connection to one host of ``npurun --hosts``: the ssh client that runs npurun there, or a shell on this host."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence

from npu_device._src import environment
from npu_device._src.cluster import handshake
from npu_device._src.cluster.time_limits import HOST_NAME_SECONDS
from npu_device._src.membership.interfaces import is_own
from npu_device._src.threads import start_thread
from npu_device.launch.arguments import LOOPBACK
from npu_device.launch.events import Events, HostClosed, HostReported
from npu_device.launch.output import Console, Pump
from npu_device.launch.reports import Report

SSH_FAILED = 255  # exit code of ssh


def is_this_host(host: str) -> bool:
    """Return whether a name or address is one of this host's; False for USER@HOST, which may be another user."""
    if host in {*LOOPBACK, socket.gethostname()}:
        return True
    if "@" in host:
        return False
    # Only ssh may know the name.
    with contextlib.suppress(OSError):
        addresses = handshake.resolve(host, 0, HOST_NAME_SECONDS)
        if any(is_own(str(address[0])) for _, address in addresses):
            return True
    # A host may not know its full name.
    with contextlib.suppress(OSError):
        # Behind a router that translates addresses, the name leads to one that no interface has.
        return host.lower() == handshake.full_name_of_this_host(HOST_NAME_SECONDS).lower()
    return False


def client(host: str) -> list[str]:
    """Return the beginning of the command line that runs a shell command on a host, by its name in the list."""
    if is_this_host(host):
        return ["sh", "-c"]
    return [*shlex.split(environment.NPU_DEVICE_SSH.get()), host]


class Connection:
    """The client process, which gets the order, then signals. It ends with the npurun on the host, or breaks."""

    def __init__(
        self,
        client: Sequence[str],
        name: str,
        serial: int,
        node: int,
        console: Console,
        events: Events,
    ) -> None:
        """Start the client. Reports of the node, and in the end the exit code, come among the events."""
        remote = f"{shlex.quote(sys.executable)} -m npu_device.launch.on_host {name} {serial}"
        # ssh passes no variables on, and PYTHONPATH decides which package is imported there.
        if os.environ.get("PYTHONPATH"):
            remote = f"env PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} {remote}"
        # Started by ``exec``, so that no shell stays between the connection and npurun.
        remote = f"cd {shlex.quote(os.getcwd())} && exec {remote}"
        self._name = name.encode()
        self._node = node
        self._events = events
        self._process = subprocess.Popen(
            [*client, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C goes to the hosts once, as the number of a signal.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None and self._process.stderr is not None
        self._input = self._process.stdin
        self._pumps = [
            Pump(self._process.stdout, console, 1),
            Pump(self._process.stderr, console, 2, takes=self._take_report),
        ]
        start_thread("npurun-host", self._wait)

    def _take_report(self, line: bytes) -> bool:
        """Make an event of a report, which is no output; return False for other lines."""
        name, _, report = line.partition(b" ")
        if name != self._name:
            return False
        # The connection may have broken within the line.
        with contextlib.suppress(ValueError):
            self._events.put(HostReported(self._node, Report(**json.loads(report))))
        return True

    def _wait(self) -> None:
        code = self._process.wait()
        for pump in self._pumps:
            pump.finish()
        with contextlib.suppress(BrokenPipeError):
            # If npurun lives on there, it learns by this that the connection has ended.
            self._input.close()
        # Numbered as a shell reports a signal.
        if code < 0:
            code = 128 - code
        self._events.put(HostClosed(self._node, code))

    def tell(self, line: str) -> None:
        # The process may have ended.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(line.encode() + b"\n")
            self._input.flush()

    def kill(self) -> None:
        self._process.kill()
