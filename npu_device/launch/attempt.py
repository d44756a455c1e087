"""One attempt on this node: arranges where the ranks meet, starts them, waits for their end, and reports the outcome.
``launcher`` repeats it.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Callable

from npu_device._src import environment
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.tracebacks import PrintedError, without_libraries
from npu_device._src.environment import NPU_DEVICE_RANK_PROCESS
from npu_device._src.horovod import modules
from npu_device._src.membership.rank_environment import rank_table
from npu_device._src.membership.schemes import secret
from npu_device._src.wording import ranges
from npu_device.launch import failures
from npu_device.launch.arguments import DEFAULT_PORT, Options
from npu_device.launch.failures import Failure
from npu_device.launch.guard import Guard
from npu_device.launch.output import Console, Pump
from npu_device.launch.reports import ATTEMPT, PREEMPTED, Starter
from npu_device.launch.supervisor import Process, Supervisor

FAILED, USAGE, CANNOT_START = 1, 2, 126  # exit codes of npurun
_TABLE = "rank_table.json"
# The other two ways to describe a job. They contradict a rank table, and the ranks would refuse both.
_OTHER_SCHEMES = (
    "CM_CHIEF_IP",
    "CM_CHIEF_PORT",
    "CM_CHIEF_DEVICE",
    "CM_WORKER_SIZE",
    "CM_WORKER_IP",
    "TF_CONFIG",
)


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt on one node."""

    # 0 if every rank ended with 0; 75 if the ranks were asked to stop and can be resumed; else that of the rank that
    # failed first, of the signal that stopped the launcher, or 126 if a rank can't be started
    code: int
    interrupted: bool = False
    preempted: bool = (
        False  # the platform takes this node away: all signals asked for a resumable end
    )
    failure: Failure | None = None  # the first one


@dataclass(frozen=True)
class Launch:
    options: Options
    console: Console
    guard: Guard
    directory: str
    events: queue.SimpleQueue[Any]  # signals, ends of ranks, and messages of node 0
    starter: Starter

    @property
    def progress_file(self) -> str:
        return os.path.join(self.directory, "progress")

    def step(self) -> str | None:
        """Return the step of the newest checkpoint, as far as rank 0, on this node, has reported it."""
        try:
            progress = Path(self.progress_file).read_text(encoding="utf-8", errors="replace")
            return progress.strip()[:40] or None
        except OSError:
            return None


@dataclass(frozen=True)
class Meeting:
    """The data that the ranks need for the rendezvous; a context manager that lets the hub end."""

    job_id: str  # name of the job, another one in each attempt, so that leftovers of an earlier one can't join
    port: int
    made_secret: str | None = field(repr=False)
    hub: HubProcess | None  # the hub; None if node 0 has it
    nodes: tuple[
        int, ...
    ]  # numbers of the nodes that take part, in order; the ranks are numbered in that order
    count: int = 0  # how often the job has been started again

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hub is not None:
            self.hub.close()

    def end(self) -> None:
        """End the hub at once, so that no rank of this attempt continues."""
        if self.hub is not None:
            self.hub.end()


def prepare_meeting(options: Options, count: int, nodes: Sequence[int] = ()) -> Meeting:
    nodes = tuple(nodes or range(options.nnodes))
    given = secret()
    made = secrets.token_hex(32) if not given and options.nnodes == 1 else None
    port = master_port(options)
    job_id = options.job_id or environment.JOB_ID.raw()
    if not job_id and options.nnodes == 1:
        job_id = f"npurun-{secrets.token_hex(6)}"
    elif not job_id:  # every node must arrive at the same name by itself
        job_id = "npurun-" + re.sub(r"[^A-Za-z0-9_-]", "-", f"{options.master_addr}-{port}")
    if count:
        job_id += f"-restart{count}"
    if options.node_rank > 0:
        return Meeting(job_id, port, None, None, nodes, count)
    # The nodes of a job that is started again meet at the port themselves, and tell each other that of the hub.
    chooses = options.nodes_meet or (options.nnodes == 1 and options.master_port is None)
    hub = HubProcess(
        secret=made.encode() if made else given,
        listen=("127.0.0.1",) if options.nnodes == 1 else (options.master_addr,),
        ports=(environment.NPU_DEVICE_PORT_RANGE.get() or (0, 0)) if chooses else (port, port),
        job_id=job_id,
        world_size=len(nodes) * options.nproc_per_node,
        expected_hosts=[f"node{node}" for node in nodes for _ in range(options.nproc_per_node)],
        host_key="node0",
        stays=True,
    )
    return Meeting(job_id, hub.port, made, hub, nodes, count)


def master_port(options: Options) -> int:
    allowed = environment.NPU_DEVICE_PORT_RANGE.get()
    return options.master_port or (allowed or (DEFAULT_PORT,))[0]


class Attempt:
    def __init__(
        self, launch: Launch, meeting: Meeting, report: Callable[[str, str], None]
    ) -> None:
        self._launch = launch
        self._options = launch.options
        self._console = launch.console
        self._meeting = meeting
        self._report = report
        self._directory = os.path.join(launch.directory, f"attempt{meeting.count}")
        self._world_size = len(meeting.nodes) * self._options.nproc_per_node
        self._processes: list[Process] = []
        self._stdout: list[Pump] = []
        self._stderr: list[Pump] = []
        self._logs: list[BinaryIO] = []
        self._started = time.time()
        self._trace = launch.options.trace
        if self._trace is not None and meeting.count:
            self._trace = os.path.join(self._trace, f"restart{meeting.count}")

    def run(self) -> Outcome:
        options = self._options
        self._launch.starter.tell(ATTEMPT, count=self._meeting.count, nodes=self._meeting.nodes)
        try:
            self._start()
            with ThreadPoolExecutor(
                1
            ) as speaker:  # a console whose reader is stopped mustn't hold up the supervisor

                def say(text: str) -> None:
                    speaker.submit(self._console.say, text)

                def report(kind: str, what: str) -> None:
                    if kind == PREEMPTED:
                        speaker.submit(self._launch.starter.tell, PREEMPTED)
                    self._report(kind, what)

                events, count = self._launch.events, self._meeting.count
                supervisor = Supervisor(self._processes, events, options, say, count, report)
                supervisor.run()
        except BaseException as error:
            for process in self._processes:
                process.send(signal.SIGKILL)
                process.reap()
            if not isinstance(error, OSError):
                raise
            program, remedy = options.command[0], ""
            if error.filename == program:
                remedy = (
                    f".\nWhat to do: name the interpreter, as in npurun sh {program}, or begin the script with a line "
                    "such as #!/usr/bin/env python3; a compiled program must be built for this host."
                )
            self._console.say(f"could not start all ranks: {error}{remedy}")
            return Outcome(CANNOT_START)
        for pump in (*self._stdout, *self._stderr):
            pump.finish()
        for log in self._logs:
            log.close()
        for process in self._processes:
            if process.exit is not None:
                self._launch.guard.tell(-process.pid)
        if self._trace is not None:
            self._console.say(
                f"the trace is in {self._trace}: npurun trace {self._trace} reports on it"
            )
        return self._conclude(supervisor)

    def _start(self) -> None:
        options, meeting = self._options, self._meeting
        os.mkdir(self._directory, mode=0o700)
        described = meeting.nodes, options.nproc_per_node, options.master_addr, meeting.port
        Path(self._directory, _TABLE).write_text(rank_table(*described), encoding="utf-8")
        if options.log_dir is not None:
            os.makedirs(options.log_dir, exist_ok=True)
        if meeting.count == 0:
            replaced = [
                name for name in ("RANK_TABLE_FILE", *_OTHER_SCHEMES) if os.environ.get(name)
            ]
            if replaced:
                names = ", ".join(replaced)
                removed = f"removed from the environment of the ranks: {names}"
                self._console.say(f"{removed}. npurun describes the job itself")
            if options.log_dir is not None and not options.tee:
                self._console.say(f"the output goes to {options.log_dir}{os.sep}rank*.log")
        for local_rank in range(options.nproc_per_node):
            rank = meeting.nodes.index(options.node_rank) * options.nproc_per_node + local_rank
            log = None
            if options.log_dir is not None:
                log = open(self._log_file(options.log_dir, rank), "wb", buffering=0)  # noqa: SIM115
                self._logs.append(log)
            process = Process(
                rank,
                options.command,
                self._environment(rank, local_rank),
                lambda: self._launch.events.put(None),
            )
            self._launch.guard.tell(process.pid)
            self._processes.append(process)
            console = self._console if log is None or options.tee else None
            self._stdout.append(Pump(process.stdout, console, 1, rank, log))
            self._stderr.append(Pump(process.stderr, console, 2, rank, log))

    def _environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the whole environment of a rank, in which the launcher sets what Ascend's launch scripts do."""
        options, meeting = self._options, self._meeting
        foreign = {
            *_OTHER_SCHEMES,
            NPU_DEVICE_RANK_PROCESS.name,
        }  # a rank that starts npurun starts another job
        variables = {name: value for name, value in os.environ.items() if name not in foreign}
        variables.update(
            RANK_TABLE_FILE=os.path.join(self._directory, _TABLE),
            RANK_ID=str(rank),
            RANK_SIZE=str(self._world_size),
            ASCEND_DEVICE_ID=str(local_rank),
            DEVICE_ID=str(local_rank),
            JOB_ID=meeting.job_id,
            NPU_DEVICE_LAUNCHER="off",  # npurun may itself be a task of Slurm's or MPI's
            NPU_DEVICE_ERROR_FILE=self._error_file(rank),
            NPU_DEVICE_HUB=str(meeting.port),
            NPU_DEVICE_RESTART_COUNT=str(meeting.count),
            NPU_DEVICE_PROGRESS_FILE=self._launch.progress_file if options.node_rank == 0 else "",
            NPU_DEVICE_PREEMPT_SIGNAL=signal.Signals(options.preempt_signal).name,
            NPU_DEVICE_PREEMPT_TIMEOUT=f"{options.preempt_timeout:g}",
            PYTHONUNBUFFERED="1",  # else a rank's output would come in blocks, and a killed rank's last block never
        )
        if options.replicate:
            variables.setdefault("PYTHONHASHSEED", str(options.seed))
        if meeting.made_secret is not None:
            variables.update(NPU_DEVICE_SECRET=meeting.made_secret)
        if options.horovod:
            variables.update(modules.variables(variables))
        if self._trace is not None:
            output = {"output": os.path.abspath(self._trace)}
            variables.update(PROFILING_MODE="true", PROFILING_OPTIONS=json.dumps(output))
        return variables

    def _log_file(self, log_dir: str, rank: int) -> str:
        attempt = f".restart{self._meeting.count}" if self._meeting.count else ""
        return os.path.join(log_dir, f"rank{rank}{attempt}.log")

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._directory, f"rank{rank}.json")

    def _conclude(self, supervisor: Supervisor) -> Outcome:
        found = self._failures(supervisor.asked_at)
        if not found and any(
            process.exit and process.exit.status == RESUMABLE for process in self._processes
        ):
            step = self._launch.step()
            at = f" at step {step}" if step is not None else ""
            self._console.say(f"stopped on request{at}, resumable")
            return Outcome(RESUMABLE, supervisor.interrupted, supervisor.preempted)
        if supervisor.signal is not None:
            self._console.say(f"stopped by {signal.Signals(supervisor.signal).name}")
            return Outcome(128 + supervisor.signal, True, supervisor.preempted)
        if not found:
            marks = [
                environment.opened_mark(self._error_file(process.rank))
                for process in self._processes
            ]
            if len(marks) > 1 and not any(map(os.path.exists, marks)):
                self._console.say(
                    f"none of the {len(marks)} ranks opened npu_device: they ran as {len(marks)} independent copies of "
                    "the script.\nTo let them work together, add `import npu_device as npu` and "
                    "`npu.open().as_default()` at the beginning of the script."
                )
            return Outcome(0, supervisor.interrupted, supervisor.preempted)
        ordered = failures.in_order(found)
        self._console.say(
            failures.summary(ordered, self._world_size, len(self._meeting.nodes), self._started)
        )
        done = [
            end
            for end in self._processes
            if end.exit and end.exit.status == 0 and end.exit.time < ordered[0].time
        ]
        if done:
            ranks = ranges({process.rank for process in done})
            self._console.say(f"before that, rank {ranks} had ended with exit code 0")
        where = "its output above"
        if self._options.log_dir is not None:
            where = self._log_file(self._options.log_dir, ordered[0].rank)
            self._console.say(f"its output is in {where}")
        evidence, left_out = without_libraries(found[ordered[0]])
        self._console.write(2, evidence.encode(errors="backslashreplace"))
        if left_out:
            self._console.say(
                f"frames of libraries left out: {left_out}; the whole traceback is in {where}"
            )
        return Outcome(ordered[0].code, supervisor.interrupted, supervisor.preempted, ordered[0])

    def _failures(self, asked_at: float | None) -> dict[Failure, list[PrintedError]]:
        found = []
        for process, pump in zip(self._processes, self._stderr):
            end = process.exit
            if end is not None and end.status not in (0, RESUMABLE):
                stopped = asked_at is not None and end.time >= asked_at
                stderr = [line.decode(errors="replace") for line in pump.tail]
                record = self._error_file(process.rank)
                found.append(
                    failures.examine(
                        process.rank, socket.gethostname(), end, record, stopped, stderr
                    )
                )
        return dict(found)
