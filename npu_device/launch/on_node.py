"""The part of ``npurun --hosts`` that runs on each host: an npurun whose command line and signals come from standard
input (see ``hosts``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator

from npu_device.launch import check, job
from npu_device.launch.arguments import Options


def main() -> None:
    """Read the order, run this host's part of the job, and exit with its exit code."""
    lines = _lines()
    order = json.loads(next(lines))
    os.environ.update(order["variables"])
    options = Options(**{**order["options"], "command": tuple(order["options"]["command"]), "hosts": ()})
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
