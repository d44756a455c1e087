"""``npurun check``: runs this file on the ranks instead of a script, with a FILE for the outcome, and prints it.

Under other launchers, without FILE, rank 0 prints it itself.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import PeerError
from npu_device._src.machine.free_memory import problem_of_memory
from npu_device._src.whole_files import write_whole
from npu_device._src.wording import counted
from npu_device.launch import launcher
from npu_device.launch.arguments import Options
from npu_device.launch.output import Console
from npu_device.launch.preparation import FAILED, START_ERRORS, USAGE

RANK_BYTES = 1 << 29  # memory of a rank that checks: mostly TensorFlow


def main() -> None:
    """Check; without FILE, exit with 1 if training would not work."""
    # The report has what the statement would say.
    os.environ.setdefault("NPU_DEVICE_STATEMENT", "off")
    from npu_device._src.check.rank import check
    from npu_device._src.training.opening import device

    try:
        device.open()
    except START_ERRORS as error:
        _fail(error)
    outcome = check()
    if len(sys.argv) > 1:
        if outcome["leads"]:
            Path(sys.argv[1]).write_text(json.dumps(outcome), encoding="utf-8")
        return
    if outcome["report"]:
        print(outcome["report"], flush=True)
    if not outcome["works"]:
        sys.exit(FAILED)


def _fail(error: Exception) -> NoReturn:
    """End because the ranks can't begin: npurun prints the text for all of them, from the record of one."""
    path = environment.NPU_DEVICE_ERROR_FILE.get()
    if path is None:
        sys.exit(str(error))
    record = {
        "time": time.time(),
        "error": f"{type(error).__name__}: {error}",
        # No frames: they would only be lines of this package.
        "traceback": str(error),
        "secondary": isinstance(error, PeerError),
    }
    write_whole(path, json.dumps(record).encode())
    sys.exit(FAILED)


# A check shouldn't wait as long as a training does. What the user sets is left alone.
_SHORTER = {
    "HCCL_CONNECT_TIMEOUT": "60",
    "NPU_DEVICE_STALL_TIMEOUT": "60",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def run(options: Options, announces: bool = True) -> int:
    """Check this node, together with the others; return 0 if training would work.

    With ``announces=False``, node 0 has told the user already how long it takes.
    """
    console = Console()
    problem = problem_of_memory(options.nproc_per_node, RANK_BYTES)
    if problem:
        console.say(problem)
        return USAGE
    for name, seconds in _SHORTER.items():
        os.environ.setdefault(name, seconds)
    # A trace that the user has asked for would trace the check.
    os.environ.pop("PROFILING_MODE", None)
    with tempfile.TemporaryDirectory(prefix="npurun-check-") as directory:
        file = Path(directory, "outcome.json")
        command = (sys.executable, "-u", "-m", "npu_device.launch.checking", str(file))
        ranks = counted(options.nnodes * options.nproc_per_node, "rank")
        nodes = counted(options.nnodes, "node")
        if announces:
            console.say(f"checking {ranks} on {nodes}: about half a minute")
        code = launcher.run(replace(options, command=command))
        if code != 0 or not file.exists():
            console.say(
                "the check could not be completed, and a training would not start; the reason is above"
            )
            return code or FAILED
        outcome = json.loads(file.read_text(encoding="utf-8"))
    print(outcome["report"] or f"{outcome['verdict']}; node 0 prints the report")
    if not outcome["works"]:
        return FAILED
    return 0


if __name__ == "__main__":
    main()
