"""``npurun --hosts``: start npurun on every host, over ssh, and stop it there.

The standard input of ``main`` there gets the order, a line of JSON with the secret, then the number of each signal
that this launcher receives. Its end stops the ranks of the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.errors import RESUMABLE, ClusterError
from npu_device._src.cluster.time_limits import HOSTS_END_SECONDS, HOSTS_NOTICE_SECONDS
from npu_device._src.membership.schemes import secret
from npu_device.launch import argument_types, checking, job
from npu_device.launch.arguments import LOOPBACK, Options
from npu_device.launch.attempt import USAGE
from npu_device.launch.output import Console, Pump

_SSH_FAILED = 255
_PREFIXES = ("TF_", "KERAS_", "PYTHON")


def run(options: Options) -> int:
    """Run the job on all hosts; return 0, 75 if the ranks can be resumed, or the code of the first host that failed."""
    console = Console()
    events = job.signals(options, console)
    nodes = []
    try:
        given = secret().decode() or secrets.token_hex(32)
        names = {variable.name for variable in environment.ALL} - {"HCCL_IF_IP"}  # which differs from host to host
        kept = {name: value for name, value in os.environ.items() if name in names or name.startswith(_PREFIXES)}
        variables = {**kept, "NPU_DEVICE_SECRET": given, "NPU_DEVICE_SECRET_FILE": ""}
        for rank, host in enumerate(options.hosts):
            ours = dataclasses.replace(options, hosts=(), node_rank=rank)
            order = json.dumps({"options": dataclasses.asdict(ours), "variables": variables})
            nodes.append(_Node(host, order, console, events))
    except UnicodeDecodeError:
        console.say(
            "the secret is not UTF-8 text, and can't be passed on to the hosts.\n"
            "What to do: write random text into its file (openssl rand -hex 32)."
        )
        return USAGE
    except (OSError, ClusterError, ValueError) as error:  # hosts that were reached stop with this process
        console.say(str(error))
        return USAGE
    return _wait(options, nodes, console, events)


def _wait(options: Options, nodes: list[_Node], console: Console, events: queue.SimpleQueue[Any]) -> int:
    codes: list[int] = []
    running, deadline, asked = list(nodes), None, False
    while running:
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            for node in running:
                if asked:
                    node.process.kill()
                else:
                    node.tell(f"{signal.SIGINT:d}")
            asked, deadline = True, time.monotonic() + options.grace + HOSTS_END_SECONDS
            continue
        if isinstance(event, int):
            if not asked:  # a second signal leaves the deadline
                seconds = options.preempt_timeout if event == options.preempt_signal else options.grace
                asked, deadline = True, time.monotonic() + seconds + HOSTS_END_SECONDS
            for node in running:
                node.tell(str(event))
            continue
        running.remove(event)
        code = event.code
        codes.append(code)
        if code == _SSH_FAILED and not event.is_here:
            console.say(
                f"{event.host}: the connection failed or ended (exit code {code} of {event.command}), unless a rank "
                "there ended with this code"
            )
        may_go_on = code in (0, RESUMABLE) or options.fewest_nodes < options.nnodes
        if running and not asked and not may_go_on and deadline is None:
            console.say(f"host {event.host} ended with exit code {code}; stopping the others")
            deadline = time.monotonic() + HOSTS_NOTICE_SECONDS
    failed = [code for code in codes if code not in (0, RESUMABLE)]
    return next(iter(failed), max(codes))


class _Node:
    """The npurun of a host; ``is_here`` if no connection is needed."""

    def __init__(self, host: str, order: str, console: Console, events: queue.SimpleQueue[Any]) -> None:
        self.host = host
        self.code = 0
        remote = f"{shlex.quote(sys.executable)} -m npu_device.launch.hosts"
        if os.environ.get("PYTHONPATH"):
            remote = f"env PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} {remote}"
        remote = f"cd {shlex.quote(os.getcwd())} && exec {remote}"
        self.is_here = host in {*LOOPBACK, socket.gethostname()}
        connect = ["sh", "-c"] if self.is_here else [*shlex.split(environment.NPU_DEVICE_SSH.get()), host]
        self.command = connect[0]
        self.process = subprocess.Popen(
            [*connect, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C goes to the hosts once, as a signal's number
        )
        self.tell(order)
        self._events = events
        assert self.process.stdout is not None and self.process.stderr is not None
        pumps = [Pump(self.process.stdout, console, 1), Pump(self.process.stderr, console, 2)]
        threading.Thread(target=self._report_end, args=(pumps,), daemon=True).start()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _report_end(self, pumps: list[Pump]) -> None:
        code = self.process.wait()
        for pump in pumps:
            pump.finish()
        self.code = code if code >= 0 else 128 - code
        self._events.put(self)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # nohup is for the npurun that sends the signals
    lines = _lines()
    given = json.loads(next(lines))
    os.environ.update(given["variables"])
    options = Options(**{**given["options"], "command": tuple(given["options"]["command"]), "hosts": ()})
    if options.nproc_per_node == 0:
        options = dataclasses.replace(options, nproc_per_node=argument_types.ranks_per_node())
    threading.Thread(target=_forward, args=(lines,), daemon=True).start()
    sys.exit(checking.run(options) if options.check else job.run(options))


def _lines() -> Iterator[bytes]:
    """Yield the lines of standard input, without Python's buffer: a thread that waits in it would hold up the exit."""
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _forward(lines: Iterator[bytes]) -> None:
    for line in lines:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGHUP)  # nobody listens any more, as when a terminal is closed


if __name__ == "__main__":
    main()
