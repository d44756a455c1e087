"""Run the hub in the process that ``hub_process`` has started."""

from __future__ import annotations

import json
import os
import signal
import sys

from npu_device._src.cluster import ports
from npu_device._src.cluster.errors import PortTakenError, RendezvousError
from npu_device._src.cluster.hub import Hub


def main() -> None:
    """Serve with the settings in the first line of standard input, which stays open while the parent runs."""
    settings = json.loads(sys.stdin.buffer.readline())
    os.chdir("/")
    # A scheduler may signal all processes of a job (Slurm). The ranks need the hub until they have ended their step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ports.allow_many_descriptors()
    try:
        listener = ports.listen(settings["listen"], settings["ports"])
    except RendezvousError as error:
        print(json.dumps({"error": str(error), "taken": isinstance(error, PortTakenError)}), flush=True)
        return
    listener.setblocking(False)
    host, port = listener.getsockname()[:2]
    print(json.dumps({"host": host, "port": port}), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    Hub(settings, listener, sys.stdin.fileno()).run()
