"""One launch from its beginning to its exit code: the parts of the launcher put together."""

from __future__ import annotations

import os
import queue
import re
import secrets
import signal
import socket
import tempfile
import time

from npu_device import environment
from npu_device.launch import child_environment, failures, rank_table, report
from npu_device.launch.arguments import Options
from npu_device.launch.console import Console, Voice
from npu_device.launch.guard import Guard
from npu_device.launch.processes import Process
from npu_device.launch.streams import LogFile, Pump
from npu_device.launch.supervisor import Supervisor

_USAGE = 2
_CANNOT_START = 126


def run(options: Options) -> int:
    """Start this node's ranks, wait for them, and leave nothing behind.

    Returns:
        0 when every rank of this node ended with 0; else the exit code of the rank that failed first (128 + number for
        a signal), 128 + number of the signal that stopped the launcher, 2 when the master address is of no use, or 126
        when a rank can't be started.
    """
    events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup, and the background jobs of a shell script, ask for being left alone.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda got, _: events.put(got))
    console = Console()
    try:
        port = options.master_port or rank_table.free_port(options.master_addr)
    except OSError as error:
        console.say(
            f"no port can be had on {options.master_addr}: {error}\n"
            "On a single node --master-addr is an address of this host; leave it out if in doubt."
        )
        return _USAGE
    with tempfile.TemporaryDirectory(prefix="npurun-") as directory, Guard(directory) as guard:
        return _Launch(options, console, guard, directory).run(events, port)


def _job_id(options: Options, port: int) -> str:
    given = options.job_id or environment.JOB_ID.raw()
    if given:
        return given
    if options.nnodes > 1:  # every node must come to the same name by itself
        return "npurun-" + re.sub(r"[^A-Za-z0-9_-]", "-", f"{options.master_addr}-{port}")
    return "npurun-" + secrets.token_hex(6)


class _Launch:
    def __init__(self, options: Options, console: Console, guard: Guard, directory: str) -> None:
        self._options = options
        self._console = console
        self._guard = guard
        self._directory = directory
        self._processes: list[Process] = []
        self._stdout: list[Pump] = []
        self._stderr: list[Pump] = []
        self._logs: list[LogFile] = []
        self._started = time.time()

    def run(self, events: queue.SimpleQueue[int | None], port: int) -> int:
        try:
            self._start(events, port)
            supervisor = Supervisor(self._processes, events, self._options.grace, self._console.say)
            supervisor.run()
        except OSError as error:
            self._kill()
            self._console.say(f"could not start all ranks: {error}")
            return _CANNOT_START
        except BaseException:
            self._kill()
            raise
        for pump in (*self._stdout, *self._stderr):
            pump.finish()
        for log in self._logs:
            log.close()
        if self._options.trace is not None:
            self._console.say(f"the trace is in {self._options.trace}: npu-trace {self._options.trace} reports on it")
        return self._conclude(supervisor)

    def _start(self, events: queue.SimpleQueue[int | None], port: int) -> None:
        options = self._options
        table = os.path.join(self._directory, "rank_table.json")
        with open(table, "w", encoding="utf-8") as file:
            file.write(rank_table.text(options.nnodes, options.nproc_per_node, options.master_addr, port))
        job_id = _job_id(options, port)
        inherited = dict(os.environ)
        replaced = child_environment.replaced(inherited)
        if replaced:
            self._console.say(
                f"the ranks won't see {', '.join(replaced)} of the environment: npurun describes the job itself"
            )
        if options.log_dir is not None:
            os.makedirs(options.log_dir, exist_ok=True)
            if not options.tee:
                self._console.say(f"the output goes to {options.log_dir}{os.sep}rank*.log")
        for local_rank in range(options.nproc_per_node):
            rank = options.rank(local_rank)
            environment = child_environment.for_rank(
                inherited,
                rank=rank,
                local_rank=local_rank,
                world_size=options.world_size,
                table=table,
                job_id=job_id,
                error_file=self._error_file(rank),
                trace=options.trace,
            )
            log = None
            if options.log_dir is not None:
                log = LogFile(os.path.join(options.log_dir, f"rank{rank}.log"))
                self._logs.append(log)
            process = Process(rank, options.command, environment, lambda: events.put(None))
            self._guard.watch(process.pid)
            self._processes.append(process)
            speaks = log is None or options.tee
            self._stdout.append(Pump(process.stdout, Voice(self._console, 1, rank) if speaks else None, log))
            self._stderr.append(Pump(process.stderr, Voice(self._console, 2, rank) if speaks else None, log))

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._directory, f"rank{rank}.json")

    def _kill(self) -> None:
        for process in self._processes:
            process.send(signal.SIGKILL)
            process.reap()

    def _conclude(self, supervisor: Supervisor) -> int:
        if supervisor.signal is not None:
            self._console.say(f"stopped by {signal.Signals(supervisor.signal).name}")
            return 128 + supervisor.signal
        found = []
        for process, pump in zip(self._processes, self._stderr):
            if process.exit is not None and process.exit.status != 0:
                stopped = supervisor.asked_at is not None and process.exit.time >= supervisor.asked_at
                stderr = tuple(line.decode(errors="replace") for line in pump.tail)
                record = failures.read_record(self._error_file(process.rank))
                found.append(failures.Failure(process.rank, process.exit, record, stopped, stderr))
        if not found:
            return 0
        ordered = failures.in_order(found)
        self._console.say(
            report.summary(ordered, self._options.world_size, self._options.nnodes, socket.gethostname(), self._started)
        )
        if self._options.log_dir is not None:
            self._console.say(f"its output is in {os.path.join(self._options.log_dir, f'rank{ordered[0].rank}.log')}")
        self._console.lines(2, report.evidence(ordered[0]).encode(errors="backslashreplace"))
        return ordered[0].code
