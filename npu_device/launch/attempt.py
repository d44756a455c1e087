"""One attempt on this node: arranges where the ranks meet, starts them, waits for their end, and reports the outcome.
``launcher`` repeats it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from npu_device._src import environment
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.tracebacks import PrintedError, without_libraries
from npu_device._src.environment import NPU_DEVICE_RANK_PROCESS
from npu_device._src.horovod import modules
from npu_device._src.membership.rank_environment import horovod_environment, rank_table
from npu_device._src.membership.schemes import secret
from npu_device._src.training.checkpoint.memory_slots import Memory
from npu_device._src.wording import ranges
from npu_device.launch import failures
from npu_device.launch.arguments import DEFAULT_PORT, Options
from npu_device.launch.binding import Binding
from npu_device.launch.events import Events
from npu_device.launch.failures import Failure
from npu_device.launch.guard import RankGuard
from npu_device.launch.output import Console, Pump
from npu_device.launch.reports import ATTEMPT, PREEMPTED, Starter
from npu_device.launch.supervisor import RankProcess, Supervisor

# Exit codes of npurun
FAILED = 1
USAGE = 2
CANNOT_START = 126
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
class NodeOutcome:
    """The end of an attempt on one node."""

    # The exit code: 0 if every rank ended with 0; 75 if the ranks were asked to stop and can be resumed; 126 if a rank
    # can't be started; else that of the rank that failed first, or of the signal that stopped the launcher.
    code: int
    interrupted: bool = False
    preempted: bool = False  # the platform takes this node away
    failure: Failure | None = None  # the first one


@dataclass(frozen=True)
class Launch:
    options: Options
    console: Console
    guard: RankGuard
    directory: str
    events: Events
    starter: Starter
    binding: Binding
    memory: Memory | None  # for copies of checkpoints; None if several nodes can't restart

    @property
    def progress_file(self) -> str:
        return os.path.join(self.directory, "progress")

    @property
    def join_requests(self) -> str:
        """The path of the pipe by which rank 0, on node 0, is asked to end the attempt for a node."""
        return os.path.join(self.directory, "joins")

    def step(self) -> str | None:
        """Return the step of the newest checkpoint, as far as rank 0, on this node, has reported it, or of a copy."""
        progress = None
        with contextlib.suppress(OSError):
            text = Path(self.progress_file).read_text(encoding="utf-8", errors="replace")
            progress = text.strip()[:40] or None
        copied = None if self.memory is None else self.memory.step()
        # A script may write anything into the file.
        if copied is None or (progress is not None and not progress.isdecimal()):
            return progress
        return str(max(copied, int(progress or 0)))


@dataclass(frozen=True)
class Rendezvous:
    """The data that the ranks need for the rendezvous; a context manager that lets the hub end."""

    job_id: str  # name of the job, another one in each attempt, so that leftovers of an earlier one can't join
    port: int
    new_secret: str | None = field(repr=False)  # made for a job whose user has given no secret
    hub: HubProcess | None  # None if node 0 has it
    nodes: tuple[int, ...]  # those that take part; the ranks are numbered in this order
    count: int = 0  # how often the job has been started again
    saves_copies: bool = False  # its ranks write copies in memory to the disk

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hub is not None:
            self.hub.close()

    def end(self) -> None:
        """End the hub at once, so that no rank of this attempt continues."""
        if self.hub is not None:
            self.hub.end()


def prepare_rendezvous(options: Options, count: int, nodes: Sequence[int] = ()) -> Rendezvous:
    """Return the rendezvous of an attempt, with its hub on node 0."""
    nodes = tuple(nodes or range(options.nnodes))
    is_single = options.nnodes == 1
    hub_secret = secret()
    new_secret = None
    if is_single and not hub_secret:
        # Several nodes can't agree on a secret by themselves: the user has to give it.
        new_secret = secrets.token_hex(32)
        hub_secret = new_secret.encode()
    port = master_port(options)
    job_id = options.job_id or environment.JOB_ID.raw()
    if not job_id and is_single:
        job_id = f"npurun-{secrets.token_hex(6)}"
    elif not job_id:
        # Every node must arrive at the same name by itself.
        job_id = "npurun-" + re.sub(r"[^A-Za-z0-9_-]", "-", f"{options.master_addr}-{port}")
    if count:
        job_id += f"-restart{count}"
    address = options.master_addr
    # Nobody outside may connect to a job of one node.
    if is_single:
        address = "127.0.0.1"
    hub = None
    if options.node_rank == 0:
        hub = HubProcess(
            secret=hub_secret,
            listen=(address,),
            ports=_hub_ports(options, port),
            job_id=job_id,
            world_size=len(nodes) * options.nproc_per_node,
            expected_hosts=[f"node{node}" for node in nodes for _ in range(options.nproc_per_node)],
            host_key="node0",
            stays=True,
        )
        # The system may have chosen it.
        port = hub.port
    return Rendezvous(job_id, port, new_secret, hub, nodes, count)


def _hub_ports(options: Options, port: int) -> tuple[int, int]:
    """Return the first and last port that the hub may choose; 0 lets the system choose."""
    # The nodes of a job that is started again meet at the port themselves, and tell each other that of the hub.
    if options.nodes_meet or (options.nnodes == 1 and options.master_port is None):
        return environment.NPU_DEVICE_PORT_RANGE.get() or (0, 0)
    return port, port


def master_port(options: Options) -> int:
    allowed_ports = environment.NPU_DEVICE_PORT_RANGE.get() or (DEFAULT_PORT, DEFAULT_PORT)
    return options.master_port or allowed_ports[0]


class AttemptObserver:
    """Learns what happens in an attempt while it runs. This one does nothing."""

    def on_failure(self, text: str) -> None: ...

    def on_preemption(self) -> None: ...


class Attempt:
    """An attempt on this node."""

    def __init__(self, launch: Launch, rendezvous: Rendezvous, observer: AttemptObserver) -> None:
        self._launch = launch
        self._options = launch.options
        self._console = launch.console
        self._rendezvous = rendezvous
        self._observer = observer
        self._directory = os.path.join(launch.directory, f"attempt{rendezvous.count}")
        self._world_size = len(rendezvous.nodes) * self._options.nproc_per_node
        self._processes: list[RankProcess] = []
        self._stdout: list[Pump] = []
        self._stderr: list[Pump] = []
        self._logs: list[BinaryIO] = []
        self._started = time.time()
        self._trace = launch.options.trace
        # The trace has a folder of its own: that of an earlier attempt stays as it is.
        if self._trace is not None and rendezvous.count:
            self._trace = os.path.join(self._trace, f"restart{rendezvous.count}")

    def run(self) -> NodeOutcome:
        self._launch.starter.tell(
            ATTEMPT, count=self._rendezvous.count, nodes=self._rendezvous.nodes
        )
        try:
            self._start()
            supervisor = self._supervise()
        except BaseException as error:
            # Ranks that were started must not wait for those that never come.
            for process in self._processes:
                process.send(signal.SIGKILL)
                process.reap()
            if not isinstance(error, OSError):
                raise
            self._console.say(f"could not start all ranks: {error}{self._remedy(error)}")
            return NodeOutcome(CANNOT_START)
        for pump in (*self._stdout, *self._stderr):
            pump.finish()
        for log in self._logs:
            log.close()
        for process in self._processes:
            if process.exit is not None:
                # A negative number: the guard forgets the process group.
                self._launch.guard.tell(-process.pid)
        if self._trace is not None:
            self._console.say(
                f"the trace is in {self._trace}: npurun trace {self._trace} reports on it"
            )
        return self._conclude(supervisor)

    # One thread keeps the order of the messages.
    def _supervise(self) -> Supervisor:
        """Return the supervisor when it has finished."""
        # A console whose reader is stopped must not hold up the supervisor.
        with ThreadPoolExecutor(1) as speaker:

            def say(text: str) -> None:
                speaker.submit(self._console.say, text)

            def on_preemption() -> None:
                speaker.submit(self._launch.starter.tell, PREEMPTED)
                self._observer.on_preemption()

            supervisor = Supervisor(
                self._processes,
                self._launch.events,
                self._options,
                say,
                self._rendezvous.count,
                self._observer.on_failure,
                on_preemption,
            )
            supervisor.run()
        return supervisor

    def _remedy(self, error: OSError) -> str:
        program = self._options.command[0]
        if error.filename != program:
            return ""
        return (
            f".\nWhat to do: name the interpreter, as in npurun sh {program}, or begin the script with a line "
            "such as #!/usr/bin/env python3; a compiled program must be built for this host."
        )

    def _start(self) -> None:
        options = self._options
        rendezvous = self._rendezvous
        os.mkdir(self._directory, mode=0o700)
        table = rank_table(
            rendezvous.nodes, options.nproc_per_node, options.master_addr, rendezvous.port
        )
        Path(self._directory, _TABLE).write_text(table, encoding="utf-8")
        if options.log_dir is not None:
            os.makedirs(options.log_dir, exist_ok=True)
        if rendezvous.count == 0:
            replaced = [
                name for name in ("RANK_TABLE_FILE", *_OTHER_SCHEMES) if os.environ.get(name)
            ]
            if replaced:
                names = ", ".join(replaced)
                removed = f"removed from the environment of the ranks: {names}"
                self._console.say(f"{removed}. npurun describes the job itself")
            if options.log_dir is not None and not options.tee:
                self._console.say(f"the output goes to {options.log_dir}{os.sep}rank*.log")
        # Nodes that were lost leave no gap in the numbers of the ranks.
        first_rank = rendezvous.nodes.index(options.node_rank) * options.nproc_per_node
        ranks = range(first_rank, first_rank + options.nproc_per_node)
        binding = self._launch.binding
        for line in binding.lines(ranks):
            self._console.say(line)
        for local_rank, rank in enumerate(ranks):
            log = None
            if options.log_dir is not None:
                log = open(self._log_file(options.log_dir, rank), "wb", buffering=0)  # noqa: SIM115
                self._logs.append(log)
            variables = self._environment(rank, local_rank)
            with binding.on_cores(local_rank):
                process = RankProcess(rank, options.command, variables, self._launch.events)
            # The guard learns of each process at once, since the launcher may be killed between two ranks.
            self._launch.guard.tell(process.pid)
            self._processes.append(process)
            console = None
            if log is None or options.tee:
                console = self._console
            self._stdout.append(Pump(process.stdout, console, 1, rank, log))
            self._stderr.append(Pump(process.stderr, console, 2, rank, log))

    def _environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the whole environment of a rank, in which the launcher sets what Ascend's launch scripts do."""
        options = self._options
        rendezvous = self._rendezvous
        variables = dict(os.environ)
        # A rank that starts npurun starts another job.
        outer_job = (NPU_DEVICE_RANK_PROCESS.name, *environment.HOROVOD_OF_A_RANK)
        for name in (*_OTHER_SCHEMES, *outer_job):
            variables.pop(name, None)
        # Only the node of rank 0 reports the step, and is asked to end for other nodes.
        progress_file = ""
        join_requests = ""
        if options.node_rank == 0:
            progress_file = self._launch.progress_file
            join_requests = self._launch.join_requests
        variables.update(
            RANK_TABLE_FILE=os.path.join(self._directory, _TABLE),
            RANK_ID=str(rank),
            RANK_SIZE=str(self._world_size),
            ASCEND_DEVICE_ID=str(local_rank),
            DEVICE_ID=str(local_rank),
            JOB_ID=rendezvous.job_id,
            # npurun may itself be a task of Slurm's or MPI's.
            NPU_DEVICE_LAUNCHER="off",
            NPU_DEVICE_ERROR_FILE=self._error_file(rank),
            NPU_DEVICE_HUB=str(rendezvous.port),
            NPU_DEVICE_RESTART_COUNT=str(rendezvous.count),
            NPU_DEVICE_PROGRESS_FILE=progress_file,
            NPU_DEVICE_JOIN_REQUESTS=join_requests,
            NPU_DEVICE_PREEMPT_SIGNAL=signal.Signals(options.preempt_signal).name,
            NPU_DEVICE_PREEMPT_TIMEOUT=f"{options.preempt_timeout:g}",
            # With a buffer, a rank's output would come in blocks, and a killed rank's last block never.
            PYTHONUNBUFFERED="1",
        )
        variables.update(self._launch.binding.variables())
        variables.pop(environment.NPU_DEVICE_MEMORY_COPIES.name, None)
        if self._launch.memory is not None:
            variables.update(NPU_DEVICE_MEMORY_COPIES=self._launch.memory.address)
        if options.replicate:
            # Ranks that iterate over sets of strings would otherwise do so in different orders.
            variables.setdefault("PYTHONHASHSEED", str(options.seed))
        if options.shard_optimizer:
            variables.update(NPU_DEVICE_SHARD_OPTIMIZER="on")
        if rendezvous.new_secret is not None:
            variables.update(NPU_DEVICE_SECRET=rendezvous.new_secret)
        if options.horovod:
            variables.update(modules.variables(variables))
            per_node = options.nproc_per_node
            variables.update(horovod_environment(rank, self._world_size, per_node))
        if self._trace is not None:
            output = {"output": os.path.abspath(self._trace)}
            variables.update(PROFILING_MODE="true", PROFILING_OPTIONS=json.dumps(output))
        return variables

    def _log_file(self, log_dir: str, rank: int) -> str:
        name = f"rank{rank}"
        if self._rendezvous.count:
            name += f".restart{self._rendezvous.count}"
        return os.path.join(log_dir, f"{name}.log")

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._directory, f"rank{rank}.json")

    def _conclude(self, supervisor: Supervisor) -> NodeOutcome:
        """Report how the attempt has ended, and return it."""
        errors_of_failures = self._failures(supervisor.asked_at)
        ranked_failures = failures.in_order(errors_of_failures)
        first_failure = next(iter(ranked_failures), None)
        interrupted = supervisor.interrupted
        # A rank ends with this code when it has written a checkpoint on request.
        if first_failure is None and RESUMABLE in self._statuses():
            text = "stopped on request"
            step = self._launch.step()
            if step is not None:
                text += f" at step {step}"
            self._console.say(f"{text}, resumable")
            code = RESUMABLE
        elif supervisor.signal is not None:
            # What the ranks printed when they were told to stop is no failure.
            self._console.say(f"stopped by {signal.Signals(supervisor.signal).name}")
            code = 128 + supervisor.signal
            interrupted = True
            first_failure = None
        elif first_failure is None:
            self._hint_at_open()
            code = 0
        else:
            self._report_failures(ranked_failures, errors_of_failures[first_failure])
            code = first_failure.code
        return NodeOutcome(code, interrupted, supervisor.preempted, first_failure)

    def _statuses(self) -> list[int]:
        return [process.exit.status for process in self._processes if process.exit]

    def _hint_at_open(self) -> None:
        marks = [
            environment.opened_mark(self._error_file(process.rank)) for process in self._processes
        ]
        # One rank alone needs no npu_device.
        if len(marks) > 1 and not any(map(os.path.exists, marks)):
            self._console.say(
                f"none of the {len(marks)} ranks opened npu_device: they ran as {len(marks)} independent copies of "
                "the script.\nTo let them work together, add `import npu_device as npu` and "
                "`npu.open()` at the beginning of the script."
            )

    def _report_failures(
        self, ranked_failures: Sequence[Failure], errors: Sequence[PrintedError]
    ) -> None:
        """Report all failures, and show the errors of the first one."""
        first_failure = ranked_failures[0]
        nnodes = len(self._rendezvous.nodes)
        self._console.say(
            failures.summary(ranked_failures, self._world_size, nnodes, self._started)
        )
        ended_well = {
            process.rank
            for process in self._processes
            if process.exit and process.exit.status == 0 and process.exit.time < first_failure.time
        }
        if ended_well:
            self._console.say(f"before that, rank {ranges(ended_well)} had ended with exit code 0")
        output = "its output above"
        if self._options.log_dir is not None:
            output = self._log_file(self._options.log_dir, first_failure.rank)
            self._console.say(f"its output is in {output}")
        text, left_out = without_libraries(errors)
        # Without a heading, these lines would look like those of a new start.
        if text and not any(error.header for error in errors):
            self._console.say("the last lines of its error output:")
        # The script may hold surrogates that no encoding takes.
        self._console.write(2, text.encode(errors="backslashreplace"))
        if left_out:
            self._console.say(
                f"frames of libraries left out: {left_out}; the whole traceback is in {output}"
            )

    def _failures(self, asked_at: float | None) -> dict[Failure, list[PrintedError]]:
        errors_of_failures = {}
        for process, pump in zip(self._processes, self._stderr):
            end = process.exit
            if end is None or end.status in (0, RESUMABLE):
                continue
            failure, errors = failures.examine(
                process.rank,
                socket.gethostname(),
                end,
                self._error_file(process.rank),
                asked_at is not None and end.time >= asked_at,
                [line.decode(errors="replace") for line in pump.tail],
            )
            errors_of_failures[failure] = errors
        return errors_of_failures
