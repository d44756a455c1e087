"""What ``npurun verify`` and ``npurun speed`` share: the options of a script, and the process that runs it as all
processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.horovod import modules
from npu_device._src.machine.free_memory import problem_of_memory
from npu_device._src.verify.file_shadow import COVERED
from npu_device._src.verify.plan import PROBLEM, PlannedProcess
from npu_device.launch.argument_types import add_options
from npu_device.launch.binding import tunables_of_ranks
from npu_device.launch.guard import RankGuard

RANK_BYTES = 2 << 30  # memory of a rank with TensorFlow and a small model
_FOR_RANKS = {
    "NPU_DEVICE_STATEMENT": "off",
    "NPU_DEVICE_LAUNCHER": "off",
    # Otherwise, the first of the processes that share a GPU would take all of its memory.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_NOT_OF_JOBS = ("NPU_DEVICE_", "TF_", "CUDA_", "NVIDIA_", "GRPC_", "MALLOC_", "no_")
"""How variables begin that don't describe a job, and so stay."""


def make_parser(
    command: str, ranks: str, description: str, table: str, **forms: Any
) -> argparse.ArgumentParser:
    """Return a parser for a command and a script: with the options of a table, and those that tell how the script is
    started. The option for the number of ranks is written as in ``ranks``.
    """
    parser = argparse.ArgumentParser(
        prog=f"npurun {command}",
        usage=f"npurun {command} [{ranks}] [options] [-m] script [argument ...]",
        description=description,
        allow_abbrev=False,
    )
    add_options(parser, table, **forms)
    add_options(
        parser,
        """
        --json       print the outcome as JSON
        --replicate  of an unchanged script, as with npurun --replicate
        --horovod    of a script that imports Horovod, as with npurun --horovod
        -m --module  the script is the name of a module
        """,
    )
    parser.add_argument("script", help="a .py file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, most_ranks: int) -> None:
    """End with a message if there is no such script, or no memory for so many ranks on this host."""
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script} (looked for it in {os.getcwd()})")
    problem = problem_of_memory(most_ranks, RANK_BYTES)
    if problem:
        parser.error(problem)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # nohup asks to ignore the end of the terminal.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            # Leaving by an exception ends the processes of the script.
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


def say(command: str, text: str) -> None:
    print(f"npurun {command}: {text}", file=sys.stderr, flush=True)


def announce(command: str, text: str) -> None:
    """Say what is run, and what stays as it is."""
    say(command, text)
    say(command, f"your files stay as they are, as far as this covers: {COVERED}")


def run_all(runner: str, start: PlannedProcess, options: argparse.Namespace, seconds: float) -> str:
    """Run a script as all processes, by the module ``runner``; return what is wrong, "" if nothing is.

    Raises:
        subprocess.TimeoutExpired: it has taken longer than so many seconds.
    """
    variables = _variables()
    if options.horovod:
        variables.update(modules.variables(variables))
    directory = Path(start.directory)
    directory.mkdir(parents=True, exist_ok=True)
    words = [json.dumps(asdict(start)), options.script, *options.arguments]
    # What the user asks to keep stays, whatever ends this process.
    removed = None if getattr(options, "keep", None) else directory
    # Processes that are killed leave their temporary files.
    temporary = Path(tempfile.mkdtemp(prefix="npurun-"))
    variables["TMPDIR"] = str(temporary)
    with RankGuard(removed, temporary) as guard:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", runner, *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        guard.tell(process.pid)
        try:
            code = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                # The whole group, with all processes that it has forked.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    problem = directory / PROBLEM
    if problem.exists():
        return problem.read_text()
    if code:
        return f"the process of the script ended with {code}"
    return ""


def _variables() -> dict[str, str]:
    """Return the environment without what describes a job: each run gets a job of its own."""
    # The C library reads its tunables when the process starts of which the ranks are forks; in one process they change
    # little.
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **_FOR_RANKS, **tunables_of_ranks()}
    for variable in environment.ALL:
        name = variable.name
        if name in ("TF_CONFIG", "NPU_DEVICE_HUB") or not name.startswith(_NOT_OF_JOBS):
            variables.pop(name, None)
    return variables
