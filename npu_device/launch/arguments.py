"""The command line of ``npurun``: torchrun's spelling, checked before anything is started."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_DEFAULT_PORT = 29688  # the port that Ascend's own launch scripts use for the chief
_JOB_ID = re.compile(r"[A-Za-z0-9_-]+")

_EXAMPLES = """\
examples:
  npurun -n 2 train.py --batch_size 64             two ranks on this host
  npurun -n 2 -m my_package.train                  a module
  npurun -n 4 --log-dir logs --tee train.py        one log file a rank as well
  npurun -n 8 --nnodes 2 --node-rank 0 --master-addr hostA train.py     on hostA
  npurun -n 8 --nnodes 2 --node-rank 1 --master-addr hostA train.py     on hostB

Options of npurun stand before the script; what follows it is the script's."""


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        command: argument vector of every rank, ready to be executed.
        nproc_per_node: ranks on each node.
        nnodes: number of nodes.
        node_rank: number of this node, from 0.
        master_addr: address of node 0, where the ranks meet.
        master_port: port where the ranks meet; None on a single node means a free one.
        log_dir: directory for one file a rank; None means no files.
        tee: with ``log_dir``, write to the console too.
        job_id: the job's name; None leaves it to ``JOB_ID`` of the environment, or to the launcher.
        grace: seconds between the request to stop and the kill.
        trace: directory for an iteration trace; None for none.
        tune: run the script several times for a few steps, and find the best gradient split.
    """

    command: tuple[str, ...]
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    log_dir: str | None = None
    tee: bool = False
    job_id: str | None = None
    grace: float = 5.0
    trace: str | None = None
    tune: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes together."""
        return self.nnodes * self.nproc_per_node

    def rank(self, local_rank: int) -> int:
        """The rank of the ``local_rank``-th process of this node."""
        return self.node_rank * self.nproc_per_node + local_rank


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the arguments without the program's name.

    Raises:
        SystemExit: 2 with a message on stderr for wrong usage, 0 after ``--help``.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.tee and given.log_dir is None:
        parser.error("--tee writes to the console as well as to the files of --log-dir: give --log-dir too")
    if given.nnodes > 1:
        missing = [name for name in ("node_rank", "master_addr") if getattr(given, name) is None]
        if missing:
            names = " and ".join("--" + name.replace("_", "-") for name in missing)
            parser.error(
                f"--nnodes {given.nnodes} needs {names} too: run npurun once on every node, with --node-rank 0 to "
                f"{given.nnodes - 1} and everywhere the same address of node 0 as --master-addr"
            )
    if given.trace is not None and given.tune:
        parser.error("--tune makes traces of its own: leave --trace out")
    node_rank = given.node_rank or 0
    if not 0 <= node_rank < given.nnodes:
        parser.error(f"--node-rank {node_rank}: with --nnodes {given.nnodes} it is 0 to {given.nnodes - 1}")
    return Options(
        command=_command(parser, given.module, given.script),
        nproc_per_node=given.nproc_per_node,
        nnodes=given.nnodes,
        node_rank=node_rank,
        master_addr=given.master_addr or "127.0.0.1",
        master_port=given.master_port or (_DEFAULT_PORT if given.nnodes > 1 else None),
        log_dir=given.log_dir,
        tee=given.tee,
        job_id=given.job_id,
        grace=given.grace,
        trace=given.trace,
        tune=given.tune,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npurun",
        usage="npurun [-n N] [options] [-m] script [argument ...]",
        description="Start a script as several ranks, stream their output, stop all of them when one fails.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation that works today breaks when a second option begins with it
    )
    _add(parser, "-n", "--nproc-per-node", type=_positive, default=1, metavar="N", help="ranks on a node (default 1)")
    _add(parser, "-m", "--module", action="store_true", help="the script is the name of a module, as with python -m")
    _add(parser, "--log-dir", metavar="DIR", help="write to DIR/rank<N>.log instead of the console")
    _add(parser, "--tee", action="store_true", help="with --log-dir: write to the console as well")
    _add(parser, "--job-id", type=_job_id, metavar="ID", help="name of the job (default $JOB_ID, else a new one)")
    _add(parser, "--grace", type=_seconds, default=5.0, metavar="S", help="seconds from asking to killing (default 5)")
    _add(parser, "--trace", metavar="DIR", help="trace the iterations into DIR, with a report (npu-trace)")
    _add(parser, "--tune", action="store_true", help="run the script a few times to find the best gradient split")
    several = parser.add_argument_group("several nodes (run npurun once on each)")
    _add(several, "--nnodes", type=_positive, default=1, metavar="N", help="number of nodes (default 1)")
    _add(several, "--node-rank", type=int, metavar="R", help="number of this node, from 0")
    _add(several, "--master-addr", metavar="ADDR", help="address or name of node 0 (one node: 127.0.0.1)")
    where = f"port of node 0 where the ranks meet (default {_DEFAULT_PORT}; one node: a free one)"
    _add(several, "--master-port", type=_port, metavar="PORT", help=where)
    # One positional for both: argparse would swallow a "--" between a script and its arguments.
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="a .py file, a program, or with -m a module; and its arguments"
    )
    return parser


def _add(target: argparse._ActionsContainer, *names: str, **settings: Any) -> None:
    """Add an option, and its spelling with underscores, which torchrun takes too, without showing that in the help."""
    target.add_argument(*names, **settings)
    underscored = "--" + names[-1][2:].replace("-", "_")
    if underscored != names[-1]:
        hidden = {**settings, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        target.add_argument(underscored, dest=underscored[2:], **hidden)


def _command(parser: argparse.ArgumentParser, module: bool, words: list[str]) -> tuple[str, ...]:
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        parser.error("the script is missing")
    script, *arguments = words
    if module:
        return (sys.executable, "-u", "-m", script, *arguments)
    if os.path.isdir(script):
        parser.error(f"{script} is a directory; name a .py file or a program, or use -m for a package")
    if script.endswith(".py"):
        if not os.path.isfile(script):
            parser.error(f"no such script: {script} (looked for it in {os.getcwd()})")
        return (sys.executable, "-u", script, *arguments)
    if os.path.isfile(script):
        if not os.access(script, os.X_OK):
            parser.error(
                f"{script} is neither .py nor executable: chmod +x it, or name the interpreter (npurun sh {script})"
            )
        return (os.path.abspath(script), *arguments)
    program = shutil.which(script)
    if program is None:
        parser.error(f"no such script or program: {script} (looked in {os.getcwd()} and on PATH; for a module: -m)")
    return (program, *arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 upwards")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _job_id(text: str) -> str:
    if not _JOB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a job id has letters, digits, '-' and '_' only")
    return text
