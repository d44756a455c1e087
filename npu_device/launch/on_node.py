"""An npurun whose command line and signals come from standard input, and that ends with it: the part of each host in
``npurun --hosts`` (see ``hosts``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping

from npu_device.launch import argument_types, check, job
from npu_device.launch.arguments import Options


def order(options: Options, variables: Mapping[str, str]) -> str:
    """Return the first line of the standard input: the command line, and variables for the environment."""
    return json.dumps({"options": dataclasses.asdict(options), "variables": dict(variables)})


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
    sys.exit(check.run(options) if options.check else job.run(options))


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
