"""One run of the launcher from start to exit code: what lasts for all attempts of the job."""

from __future__ import annotations

import queue
import signal
import tempfile
from typing import Any

from npu_device.launch import restarts
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import Launch
from npu_device.launch.console import Console
from npu_device.launch.guard import Guard


def run(options: Options) -> int:
    """Start this node's ranks, wait for them, start them again if asked to, and leave no process behind.

    Returns:
        The exit code of ``restarts.run``.
    """
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, options.preempt_signal}:
        # nohup, and a shell script's background jobs, ask to ignore the signal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda got, _: events.put(got))
    console = Console()
    with tempfile.TemporaryDirectory(prefix="npurun-") as directory, Guard(directory) as guard:
        return restarts.run(Launch(options, console, guard, directory, events))
