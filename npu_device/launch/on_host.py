"""The npurun of one host of ``npurun --hosts``, which ``ssh_hosts`` starts there over ssh.

Standard input gets the order, a line of JSON with the secret, then the number of each signal that the npurun that was
started by hand receives. Its end ends the ranks of the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from npu_device._src.cluster.roster import is_running, parent_and_start, start_time
from npu_device._src.cluster.time_limits import KILL_SECONDS, NODE_STOP_SECONDS, SWEEP_SECONDS
from npu_device._src.threads import start_thread
from npu_device.launch import argument_types, checking, launcher
from npu_device.launch.arguments import Options
from npu_device.launch.member import NodeLeavesError
from npu_device.launch.output import Console
from npu_device.launch.preparation import FAILED
from npu_device.launch.reports import LEAVING, OVER, RUNNING, Reporter


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The default is restored, since nohup is for the npurun that sends the signals.
        signal.signal(signum, signal.SIG_DFL)
    name = sys.argv[1]
    serial = int(sys.argv[2])
    # Without a buffer, since a thread that waits in it would hold up the exit.
    lines = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    order = json.loads(next(lines))
    # Set before anything reads them.
    os.environ.update(order["variables"])
    options = Options(**order["options"])
    # Resolved here, since only the host knows its GPUs.
    if options.nproc_per_node == 0:
        options = dataclasses.replace(options, nproc_per_node=argument_types.ranks_per_node())
    reporter = Reporter(name, Console(), order["count"], order["nodes"])
    problem = _problem_on_host(name, serial)
    if problem:
        reporter.console.say(problem)
        sys.exit(FAILED)
    reporter.tell(RUNNING)
    start_thread("npurun-orders", _obey, lines, options, reporter)
    sys.exit(_run(options, reporter))


def _run(options: Options, reporter: Reporter) -> int:
    state = OVER
    try:
        if options.check:
            code = checking.run(options, announces=options.node_rank == 0)
        else:
            code = launcher.run(options, reporter)
    except SystemExit as end:
        # A job on several nodes ends by this exception.
        code = int(end.code or 0)
        if isinstance(end, NodeLeavesError):
            state = LEAVING
    reporter.tell(state, code=code)
    return code


def _obey(lines: Iterable[bytes], options: Options, reporter: Reporter) -> None:
    for line in lines:
        # The signal reaches this process's own handlers, as if it had been sent on this host.
        os.kill(os.getpid(), int(line))
    # The connection has ended. In a job without restarts, as when a terminal is closed.
    if not options.restarts_hosts:
        os.kill(os.getpid(), signal.SIGHUP)
        return
    # A job with restarts loses this host only: it is killed, since a signal would end the job on the other hosts, too.
    # The host shuts down, and its ranks are writing a checkpoint.
    if reporter.is_preempted:
        time.sleep(options.preempt_timeout + NODE_STOP_SECONDS)
    # The guard ends the ranks.
    os.kill(os.getpid(), signal.SIGKILL)


def _problem_on_host(name: str, serial: int) -> str:
    """End what an earlier connection of the job has left on this host; return why that can't be, "" if it is done."""
    lines = _command_lines()
    # ``connection`` wrote the last two words of its command line.
    serials = {
        pid: int(match[1])
        for pid, line in lines.items()
        if (match := re.search(rf"\0{name}\0(\d+)\0$", line))
    }
    if max(serials.values(), default=serial) > serial:
        return "another npurun of this job was started on this host: the connection of this one is broken"
    older = [pid for pid in serials if serials[pid] < serial]
    # The guard of an npurun that was killed ends when it has killed the ranks. Its last word is their directory.
    guards = [pid for pid, line in lines.items() if re.search(rf"/{name}-[^/]*\0$", line)]
    # Stopped first, so that they start no more processes.
    _send(signal.SIGSTOP, older)
    # The hub of earlier ranks would live as long as ranks on other hosts are connected to it, so it is killed, too.
    children = [pid for pid in _processes() if parent_and_start(pid)[0] in older]
    killed = [*older, *(pid for pid in children if pid not in guards)]
    # The start time goes with the number of a process, which may be used again.
    ending = {pid: start_time(pid) for pid in [*killed, *guards]}
    _send(signal.SIGKILL, killed)
    deadline = time.monotonic() + KILL_SECONDS
    while running := [pid for pid, started in ending.items() if is_running(pid, started)]:
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, running))
            return (
                f"processes of an earlier npurun of this job can't be killed on this host: {pids}"
            )
        time.sleep(SWEEP_SECONDS)
    return ""


def _command_lines() -> dict[int, str]:
    """Return the words of each process, each of them with a zero at its end."""
    lines = {}
    for pid in _processes():
        # The process may have ended.
        with contextlib.suppress(OSError):
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return lines


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _send(signum: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


if __name__ == "__main__":
    main()
