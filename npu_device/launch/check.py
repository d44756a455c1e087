"""``npurun check``: runs ``checking`` on the ranks instead of a script, and prints what they found."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from npu_device._src.cluster.frames import counted
from npu_device._src.cluster.handshake import AttemptFailedError, resolve
from npu_device._src.cluster.ports import is_loopback
from npu_device._src.cluster.time_limits import RESOLVE_SECONDS
from npu_device.launch import job
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import FAILED
from npu_device.launch.console import Console

# A check shouldn't wait as long as a training does. What the user sets is left alone.
_SHORTER = {"HCCL_CONNECT_TIMEOUT": "60", "NPU_DEVICE_STALL_TIMEOUT": "60", "TF_CPP_MIN_LOG_LEVEL": "3"}


def run(options: Options) -> int:
    """Check this node, together with the others."""
    console = Console()
    try:
        _resolve(options, console)
    except AttemptFailedError as failure:
        console.say(
            f"--master-addr {options.master_addr}, on {socket.gethostname()}: {failure}.\n"
            "What to do: give node 0's IP address, or add the name to the DNS or to /etc/hosts on every node."
        )
        return FAILED
    for name, value in _SHORTER.items():
        os.environ.setdefault(name, value)
    os.environ.pop("PROFILING_MODE", None)  # it would trace the check
    with tempfile.TemporaryDirectory(prefix="npurun-check-") as directory:
        file = Path(directory, "outcome.json")
        command = (sys.executable, "-u", "-m", "npu_device.launch.checking", str(file))
        ranks, nodes = counted(options.world_size, "rank"), counted(options.nnodes, "node")
        console.say(f"checking {ranks} on {nodes}: about half a minute")
        code = job.run(replace(options, command=command))
        if code != 0 or not file.exists():
            console.say("the check could not be completed, and a training would not start; the reason is above")
            return code or FAILED
        outcome = json.loads(file.read_text(encoding="utf-8"))
    print(outcome["report"] or f"{outcome['verdict']}; node 0 prints the report")
    return 0 if outcome["works"] else FAILED


def _resolve(options: Options, console: Console) -> None:
    """Resolve node 0's name, and say what is odd about it."""
    found = resolve(options.master_addr, 0, RESOLVE_SECONDS)
    addresses = list(dict.fromkeys(str(address[0]) for _, address in found))
    if options.node_rank > 0 and any(map(is_loopback, addresses)):
        console.say(
            f"--master-addr {options.master_addr} is {', '.join(addresses)} on {socket.gethostname()}, the loopback: "
            "only ranks on this machine can be reached there.\n"
            "What to do: unless node 0 runs here too, give its address in the network."
        )
