"""One attempt on this node: starts the ranks, waits for their end, and reports the outcome. ``launcher`` repeats it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.tracebacks import PrintedError, without_libraries
from npu_device._src.horovod import modules
from npu_device._src.membership.rank_environment import (
    horovod_environment,
    rank_table,
    rank_variables,
)
from npu_device._src.wording import ranges
from npu_device.launch import failures
from npu_device.launch.failures import Failure
from npu_device.launch.node_protocol import NodeOutcome
from npu_device.launch.preparation import CANNOT_START, Launch, Rendezvous
from npu_device.launch.reports import ATTEMPT
from npu_device.launch.supervisor import RankProcess, Supervisor, exits

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
# A rank may itself start npurun. That is a different job, for which these would be wrong.
_VARIABLES_OF_A_RANK = (
    environment.NPU_DEVICE_RANK_PROCESS.name,
    environment.NPU_DEVICE_MEMORY_COPIES.name,
    *environment.HOROVOD_OF_A_RANK,
)


def _tell_nobody(message: object) -> None:
    """Drop a message for node 0, in a job whose nodes aren't led."""


class Attempt:
    """An attempt on this node."""

    def __init__(
        self,
        launch: Launch,
        rendezvous: Rendezvous,
        notify: Callable[[Any], object] = _tell_nobody,
    ) -> None:
        self._launch = launch
        self._options = launch.options
        self._say = launch.console.say
        self._plan = rendezvous.plan
        self._new_secret = rendezvous.new_secret
        self._notify = notify
        self._directory = os.path.join(launch.directory, f"attempt{self._plan.count}")
        self._world_size = len(self._plan.nodes) * self._options.nproc_per_node
        self._processes: list[RankProcess] = []
        self._started = time.time()
        self._trace = launch.options.trace
        # The trace has a folder of its own: the trace of an earlier attempt stays as it is.
        if self._trace is not None and self._plan.count:
            self._trace = os.path.join(self._trace, f"restart{self._plan.count}")

    def run(self) -> NodeOutcome:
        self._launch.reporter.tell(ATTEMPT, count=self._plan.count, nodes=self._plan.nodes)
        supervisor = Supervisor(self._processes, self._launch, self._notify)
        try:
            self._start()
            supervisor.run()
        except BaseException as error:
            # Ranks that were started must not wait for ranks that never come.
            for process in self._processes:
                process.send(signal.SIGKILL)
                process.reap()
            if not isinstance(error, OSError):
                raise
            self._say(f"could not start all ranks: {error}{self._remedy(error)}")
            return NodeOutcome(CANNOT_START)
        for process in self._processes:
            process.finish()
        if self._trace is not None:
            self._say(f"the trace is in {self._trace}: npurun trace {self._trace} reports on it")
        return self._conclude(supervisor)

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
        plan = self._plan
        # Cleaners of old files other than systemd's may have removed the folder since the job began.
        os.makedirs(self._launch.directory, mode=0o700, exist_ok=True)
        os.mkdir(self._directory, mode=0o700)
        table = rank_table(plan.nodes, options.nproc_per_node, options.master_addr, plan.port)
        Path(self._directory, _TABLE).write_text(table, encoding="utf-8")
        if options.log_dir is not None:
            os.makedirs(options.log_dir, exist_ok=True)
        if plan.count == 0:
            replaced = [
                name for name in ("RANK_TABLE_FILE", *_OTHER_SCHEMES) if os.environ.get(name)
            ]
            if replaced:
                self._say(
                    f"removed from the environment of the ranks: {', '.join(replaced)}. npurun describes the job "
                    "itself"
                )
            if options.log_dir is not None and not options.tee:
                self._say(f"the output goes to {options.log_dir}{os.sep}rank*.log")
        # Nodes that were lost leave no gap in the numbers of the ranks.
        first_rank = plan.nodes.index(options.node_rank) * options.nproc_per_node
        ranks = range(first_rank, first_rank + options.nproc_per_node)
        binding = self._launch.binding
        for line in binding.lines(ranks):
            self._say(line)
        for local_rank, rank in enumerate(ranks):
            variables = self._environment(rank, local_rank)
            with binding.on_cores(local_rank):
                process = RankProcess(self._launch, rank, variables, self._log_file(rank))
            self._processes.append(process)

    def _environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the whole environment of a rank, in which the launcher sets what Ascend's launch scripts do."""
        options = self._options
        variables = dict(os.environ)
        for name in (*_OTHER_SCHEMES, *_VARIABLES_OF_A_RANK):
            variables.pop(name, None)
        # Only the node of rank 0 reports the step, and is asked to end for other nodes.
        progress_file = ""
        join_requests = ""
        if options.node_rank == 0:
            progress_file = self._launch.progress_file
            join_requests = self._launch.join_requests
        table = os.path.join(self._directory, _TABLE)
        size = self._world_size
        variables.update(rank_variables(table, rank, local_rank, size, self._plan.job_id))
        variables.update(
            # npurun may itself be a task of Slurm's or MPI's.
            NPU_DEVICE_LAUNCHER="off",
            NPU_DEVICE_ERROR_FILE=self._error_file(rank),
            NPU_DEVICE_HUB=str(self._plan.port),
            NPU_DEVICE_RESTART_COUNT=str(self._plan.count),
            NPU_DEVICE_PROGRESS_FILE=progress_file,
            NPU_DEVICE_JOIN_REQUESTS=join_requests,
            NPU_DEVICE_PREEMPT_SIGNAL=signal.Signals(options.preempt_signal).name,
            NPU_DEVICE_PREEMPT_TIMEOUT=f"{options.preempt_timeout:g}",
            # With a buffer, a rank's output would come in blocks, and a killed rank's last block never.
            PYTHONUNBUFFERED="1",
        )
        variables.update(self._launch.binding.variables())
        if self._launch.copy_memory is not None:
            variables["NPU_DEVICE_MEMORY_COPIES"] = self._launch.copy_memory.address
        if options.replicate:
            # Ranks that iterate over sets of strings would otherwise do so in different orders.
            variables.setdefault("PYTHONHASHSEED", str(options.seed))
        if options.shard_optimizer:
            variables["NPU_DEVICE_SHARD_OPTIMIZER"] = "on"
        if self._new_secret is not None:
            variables["NPU_DEVICE_SECRET"] = self._new_secret
        if options.horovod:
            variables.update(modules.variables(variables))
            variables.update(horovod_environment(rank, size, options.nproc_per_node))
        if self._trace is not None:
            output = {"output": os.path.abspath(self._trace)}
            variables.update(PROFILING_MODE="true", PROFILING_OPTIONS=json.dumps(output))
        return variables

    def _log_file(self, rank: int) -> str | None:
        if self._options.log_dir is None:
            return None
        name = f"rank{rank}"
        if self._plan.count:
            name += f".restart{self._plan.count}"
        return os.path.join(self._options.log_dir, f"{name}.log")

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._directory, f"rank{rank}.json")

    def _conclude(self, supervisor: Supervisor) -> NodeOutcome:
        """Report how the attempt has ended, and return it."""
        errors_of_failures = self._failures(supervisor.asked_at)
        ranked_failures = failures.in_order(errors_of_failures)
        first_failure = next(iter(ranked_failures), None)
        # A rank ends with this code when it has written a checkpoint on request.
        if first_failure is None and RESUMABLE in [end.status for end in exits(self._processes)]:
            text = "stopped on request"
            step = self._launch.step()
            if step is not None:
                text += f" at step {step}"
            self._say(f"{text}, resumable")
            code = RESUMABLE
        elif supervisor.signal is not None:
            # What the ranks printed when they were told to stop is no failure.
            self._say(f"stopped by {signal.Signals(supervisor.signal).name}")
            code = 128 + supervisor.signal
            first_failure = None
        elif first_failure is None:
            self._hint_at_open()
            code = 0
        else:
            self._report_failures(ranked_failures, errors_of_failures[first_failure])
            code = first_failure.code
        return NodeOutcome(code, supervisor.is_interrupted, supervisor.is_preempted, first_failure)

    def _hint_at_open(self) -> None:
        marks = [
            environment.opened_mark(self._error_file(process.rank)) for process in self._processes
        ]
        # Whoever has removed the rank table, as an old file, has removed the marks, too.
        is_whole = os.path.exists(os.path.join(self._directory, _TABLE))
        # One rank alone needs no npu_device.
        if len(marks) > 1 and is_whole and not any(map(os.path.exists, marks)):
            self._say(
                f"none of the {len(marks)} ranks opened npu_device: they ran as {len(marks)} independent copies of "
                "the script.\nTo let them work together, add `import npu_device as npu` and "
                "`npu.open()` at the beginning of the script, and let them reduce their gradients "
                "(npu.distribute.all_reduce, or NPUDistributedOptimizer in a session)."
            )

    def _report_failures(
        self, ranked_failures: Sequence[Failure], errors: Sequence[PrintedError]
    ) -> None:
        """Report all failures, and show the errors of the first one."""
        first_failure = ranked_failures[0]
        if first_failure.recorded and not any(error.header for error in errors):
            # The text that ``checking`` records says all.
            self._say("\n".join(error.text() for error in errors))
            return
        nnodes = len(self._plan.nodes)
        self._say(failures.summary(ranked_failures, self._world_size, nnodes, self._started))
        ended_well = {
            end.rank
            for end in exits(self._processes)
            if end.status == 0 and end.time < first_failure.time
        }
        if ended_well:
            self._say(f"before that, rank {ranges(ended_well)} had ended with exit code 0")
        log_file = self._log_file(first_failure.rank)
        if log_file is not None:
            self._say(f"its output is in {log_file}")
        text, left_out = without_libraries(errors)
        # Without a heading, these lines would look like lines of a new start.
        if text and not any(error.header for error in errors):
            self._say("the last lines of its error output:")
        # The script may hold surrogates that no encoding takes.
        self._launch.console.write(2, text.encode(errors="backslashreplace"))
        if left_out:
            output = log_file or "its output above"
            self._say(
                f"frames of libraries left out: {left_out}; the whole traceback is in {output}"
            )

    def _failures(self, asked_at: float | None) -> dict[Failure, list[PrintedError]]:
        errors_of_failures = {}
        for process in self._processes:
            end = process.exit
            if end is None or end.status in (0, RESUMABLE):
                continue
            failure, errors = failures.examine(
                end,
                self._error_file(end.rank),
                asked_at is not None and end.time >= asked_at,
                process.last_lines(),
            )
            errors_of_failures[failure] = errors
        return errors_of_failures
