"""The command line of ``npurun``: torchrun's spelling, checked before anything is started."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from npu_device._src import environment
from npu_device._src.wording import counted
from npu_device.launch import argument_types as types
from npu_device.launch.argument_types import AUTO

DEFAULT_PORT = 29688  # the port that Ascend's own launch scripts use for the chief
LOOPBACK = frozenset(("localhost", "127.0.0.1"))
INSTEAD_OF_TUNING = (
    "What to do: trace the script with two splits, npurun -n 2 --trace a train.py and NPU_DEVICE_SPLIT=25%,25%,25%,25% "
    "npurun -n 2 --trace b train.py, and compare them with npurun trace a b"
)
_NUMBERS = ("-n", "-np", "--nproc-per-node", "--nproc_per_node")

_USAGE = """\
npurun [-n N] [options] [-m] script [argument ...]
       npurun check [options] | verify [options] script | port script | trace DIR | docs"""

_DESCRIPTION = """\
Start a script as several ranks, forward their output, and stop all of them when one fails.

commands, as the first word (npurun ./trace runs a program of that name):
  check         check hosts and network, without a script: would training work?
  verify        run a script for a few steps as one process and on N ranks: does it train right?
  port          make a script of ordinary TensorFlow run on many ranks
  trace DIR     report on the trace that --trace has written
  docs [NAME]   show a page of the documentation"""

_EXAMPLES = """\
examples:
  npurun -n 2 train.py --batch_size 64             two ranks on this host
  npurun --hosts hostA:8,hostB:8 train.py          both hosts from here, over ssh

Options of npurun go before the script; everything after it belongs to the script."""


@dataclass(frozen=True)
class Options:
    command: tuple[str, ...]  # argument vector of every rank, ready to be executed
    nproc_per_node: int  # ranks on each node; 0 if each of ``hosts`` counts its GPUs
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None  # port where the ranks meet; None on a single node means a free one
    log_dir: str | None
    tee: bool
    job_id: str | None
    grace: float
    trace: str | None
    check: bool
    fewest_nodes: (
        int  # the smallest number of nodes to go on with; ``nnodes`` unless the user says otherwise
    )
    max_restarts: int
    max_preemptions: (
        int | None
    )  # how often a job goes on after a node was taken away; None for any number
    restart_backoff: float  # seconds before the first restart; each further one without a new checkpoint doubles them
    rejoin_timeout: float  # seconds that nodes wait for each other before an attempt
    preempt_signal: (
        int  # number of the signal that asks the ranks for a checkpoint and a resumable end
    )
    preempt_timeout: float  # seconds that the ranks have for that
    hosts: tuple[
        str, ...
    ]  # the nodes' hosts, reached by ssh; empty if npurun is started on each node
    horovod: bool
    replicate: bool
    seed: int  # of all ranks, with ``replicate``

    @property
    def nodes_meet(self) -> bool:
        """Return True if the launchers of several nodes act together, because they may start the job again."""
        may_go_on = (
            self.max_restarts > 0 or bool(self.max_preemptions) or self.fewest_nodes < self.nnodes
        )
        return self.nnodes > 1 and may_go_on

    @property
    def outlives_preemption(self) -> bool:
        """Return True if the preemption signal takes one node away, and doesn't end the job."""
        return self.nodes_meet and self.max_preemptions != 0

    @property
    def restarts_hosts(self) -> bool:
        """Return True if ``npurun --hosts`` starts the npurun of a lost host again."""
        return self.nodes_meet or self.max_restarts > 0


def parse(argv: Sequence[str]) -> Options:
    parser = _parser()
    given = parser.parse_args(argv)
    slots = _hosts(parser, given)
    if not slots:
        _take_from_platform(parser, given)
    fewest, nnodes = given.nnodes
    if given.tee and given.log_dir is None:
        parser.error(
            "--tee writes to the console as well as to the files of --log-dir: give --log-dir too"
        )
    if nnodes > 1 and not slots:
        missing = [name for name in ("node_rank", "master_addr") if getattr(given, name) is None]
        if missing:
            names = " and ".join("--" + name.replace("_", "-") for name in missing)
            parser.error(
                f"--nnodes {nnodes} needs {names} too: run npurun once on every node, with --node-rank 0 to "
                f"{nnodes - 1} and everywhere the same address of node 0 as --master-addr"
            )
    if given.tune:
        parser.error(
            f"--tune is gone: four equal segments were as fast as what it found. {INSTEAD_OF_TUNING}"
        )
    again = given.max_restarts or given.max_preemptions or fewest < nnodes
    if given.check and (given.script or given.trace or again):
        parser.error(
            "check runs its own script once: omit the script, --trace, --max-restarts and MIN:MAX nodes"
        )
    if given.nproc_per_node == AUTO:  # each of --hosts counts its own GPUs
        given.nproc_per_node = 0 if slots else types.ranks_per_node()
    if given.nproc_per_node == 1 == nnodes:
        _hint_at_options_after_script(given.module, given.script)
    given.node_rank = given.node_rank or 0
    if not 0 <= given.node_rank < nnodes:
        parser.error(
            f"--node-rank {given.node_rank}: with --nnodes {nnodes} it is 0 to {nnodes - 1}"
        )
    given.command = () if given.check else _command(parser, given.module, given.script)
    if given.replicate and given.horovod:
        parser.error(
            "--replicate is for scripts without calls of Horovod: give either --replicate or --horovod"
        )
    if given.replicate:
        python, *words = given.command
        if python != sys.executable:
            parser.error("--replicate takes a .py file, or a module with -m")
        program = "npu_device._src.replicate.main_program"
        given.command = (python, "-u", "-m", program, str(given.seed), *words[1:])
    given.hosts = tuple(host for host, _ in slots)
    given.fewest_nodes, given.nnodes = fewest, nnodes
    given.master_addr = given.master_addr or "127.0.0.1"
    return Options(**{field.name: getattr(given, field.name) for field in fields(Options)})


def _take_from_platform(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Complete the arguments as Kubeflow's torch runtime (``PET_*``) or else SkyPilot says; the command line wins.

    Not the number of ranks per node: ``PET_NPROC_PER_NODE`` is the number of CPUs there.
    """
    found: dict[str, Any] = {"nnodes": (1, 1)}
    try:
        if environment.PET_NNODES.get() is not None:
            found = {
                "nnodes": types.nodes(environment.PET_NNODES.raw() or ""),
                "node_rank": environment.PET_NODE_RANK.get(),
                "master_addr": environment.PET_MASTER_ADDR.get(),
                "master_port": environment.PET_MASTER_PORT.get(),
            }
        elif (nodes := environment.SKYPILOT_NUM_NODES.get()) is not None:
            addresses = (environment.SKYPILOT_NODE_IPS.get() or "").split()
            found = {
                "nnodes": (nodes, nodes),
                "node_rank": environment.SKYPILOT_NODE_RANK.get(),
                "master_addr": addresses[0] if addresses else None,
            }
    except ValueError as error:
        parser.error(str(error))
    given.nnodes = given.nnodes or found["nnodes"]
    if len(found) == 1 or given.nnodes[1] == 1:
        return
    for name, value in found.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.node_rank is not None and given.master_addr is not None:
        variable = "PET_NNODES" if environment.PET_NNODES.is_set() else "SKYPILOT_NUM_NODES"
        place = f"node {given.node_rank} of {given.nnodes[1]}, and node 0 is {given.master_addr}"
        print(
            f"npurun: {variable} and others of the platform say that this is {place}",
            file=sys.stderr,
        )


def _hosts(
    parser: argparse.ArgumentParser, given: argparse.Namespace
) -> list[tuple[str, int | None]]:
    """Return the hosts of --hosts or --hostfile, and complete the other arguments from them."""
    total = given.num_proc
    if total is not None and (given.nproc_per_node != AUTO or given.nnodes is not None):
        nnodes = given.nnodes[1] if given.nnodes else 1
        each = (
            f"-n {max(1, total // nnodes)} --nnodes {nnodes}"
            if nnodes > 1
            else f"-n {given.nproc_per_node}"
        )
        parser.error(
            f"-np {total} counts the ranks of all hosts, -n those of each node. Give one of them: npurun -np {total} "
            f"-H a:N,b:N; or npurun {each}"
        )
    if given.hosts is None and given.hostfile is None:
        given.nproc_per_node = total or given.nproc_per_node
        return []
    if given.hosts is not None and given.hostfile is not None:
        parser.error("--hosts and --hostfile name the same thing: give one of them")
    if given.node_rank is not None:
        parser.error(
            "--node-rank belongs to an npurun that is started on each node: leave --hosts out"
        )
    try:
        found = (
            types.parse_hosts(given.hosts)
            if given.hostfile is None
            else types.read_hosts(given.hostfile)
        )
        found = found if total is None else types.filled_hosts(found, total)
    except (OSError, ValueError) as error:
        parser.error(f"{'--hosts' if given.hostfile is None else '--hostfile'}: {error}")
    numbers = {number for _, number in found if number is not None}
    if given.nproc_per_node != AUTO:
        numbers.add(given.nproc_per_node)
    if len(numbers) > 1:
        parser.error(
            f"npurun starts the same number of ranks on each host; found {sorted(numbers)}"
        )
    given.nproc_per_node = next(iter(numbers), AUTO)
    fewest, most = given.nnodes or (1, 1)
    if most not in (1, len(found)):
        parser.error(f"--nnodes {most}: the list has {counted(len(found), 'host')}")
    first, *others = (host.rpartition("@")[2] for host, _ in found)
    remote = [host for host in others if host not in LOOPBACK]
    if given.master_addr is None and first in LOOPBACK and remote:
        parser.error(
            f"{first} is another host for {remote[0]}, and the ranks meet on the first host of the list: give its "
            "name or address there, or as --master-addr"
        )
    given.nnodes = (fewest if most > 1 else len(found), len(found))
    given.master_addr = given.master_addr or (first if len(found) > 1 else None)
    return found


def _hint_at_options_after_script(module: bool, words: Sequence[str]) -> None:
    """Print a hint on stderr if the script's first argument looks like the number of ranks."""
    if len(words) > 2 and words[1] in _NUMBERS and words[2].isdecimal():
        dash_m = "-m " if module else ""
        print(
            f"npurun: {words[1]} {words[2]} comes after {words[0]}, so the script gets it. For {words[2]} "
            f"ranks: npurun -n {words[2]} {dash_m}{words[0]}",
            file=sys.stderr,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npurun",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation that works today breaks when a second option begins with it
    )
    each = "ranks per node, or auto: one per visible GPU, or one rank without GPUs (default auto)"
    _add(parser, "-n", "--nproc-per-node", type=types.ranks, default=AUTO, metavar="N", help=each)
    _add(
        parser,
        "-m",
        "--module",
        action="store_true",
        help="the script is the name of a module, as with python -m",
    )
    _add(parser, "--log-dir", metavar="DIR", help="write to DIR/rank<N>.log, not to the console")
    _add(parser, "--tee", action="store_true", help="with --log-dir: write to the console as well")
    _add(
        parser,
        "--job-id",
        type=types.job_id,
        metavar="ID",
        help="name of the job (default $JOB_ID, else a new one)",
    )
    grace = "seconds until running ranks are killed (default 5)"
    _add(parser, "--grace", type=types.seconds, default=5.0, metavar="S", help=grace)
    _add(
        parser, "--trace", metavar="DIR", help="write a trace of the iterations and a report to DIR"
    )
    parser.add_argument(
        "--tune", action="store_true", help=argparse.SUPPRESS
    )  # until 0.3.0: gone since 0.2.0
    horovod = "let import horovod find npu_device.horovod"
    _add(parser, "--horovod", action="store_true", help=horovod)
    unchanged = "train an unchanged Keras script (--seed N: the seed)"
    _add(parser, "--replicate", action="store_true", help=unchanged)
    parser.add_argument("--seed", type=types.count, default=1, help=argparse.SUPPRESS)
    _add(
        parser, "--check", action="store_true", help=argparse.SUPPRESS
    )  # until 0.3.0; since 0.2.0: npurun check
    _add_nodes(
        parser.add_argument_group("several nodes (run npurun once on each, or give --hosts)")
    )
    _add_failures(parser.add_argument_group("failures and preemption (npurun docs reliability)"))
    # One positional for both: argparse would swallow a "--" between a script and its arguments.
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        help="a .py file, a program, or with -m a module, and its arguments",
    )
    return parser


def _add_nodes(several: argparse._ActionsContainer) -> None:
    _add(
        several, "--hosts", metavar="A:N,B:N", help="start all nodes from here, over ssh (also -H)"
    )
    several.add_argument("-H", dest="hosts", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    _add(several, "--hostfile", metavar="FILE", help="the same, from lines such as: A slots=N")
    total = "number of ranks on all hosts together"
    several.add_argument("-np", dest="num_proc", type=types.positive, metavar="N", help=total)
    several_nodes = (
        "number of nodes (default 1); MIN:MAX: start with MAX nodes, continue with MIN or more"
    )
    _add(several, "--nnodes", type=types.nodes, metavar="N", help=several_nodes)
    _add(several, "--node-rank", type=int, metavar="R", help="number of this node, from 0")
    _add(
        several,
        "--master-addr",
        metavar="ADDR",
        help="address or name of node 0 (one node: 127.0.0.1)",
    )
    where = f"port of node 0 where the ranks meet (default {DEFAULT_PORT}; one node: a free one)"
    _add(several, "--master-port", type=types.port, metavar="PORT", help=where)
    rejoin = "seconds that nodes wait for each other, and --hosts tries a lost host (default 300)"
    _add(several, "--rejoin-timeout", type=types.seconds, default=300.0, metavar="S", help=rejoin)


def _add_failures(again: argparse._ActionsContainer) -> None:
    _add(
        again,
        "--max-restarts",
        type=types.count,
        default=0,
        metavar="N",
        help="start a failed job again (default 0)",
    )
    taken = "continue N times when a node is taken away (default: any number; 0: end the job)"
    _add(again, "--max-preemptions", type=types.count, metavar="N", help=taken)
    backoff = "seconds before a restart, doubled each time up to 60 (default 1)"
    _add(again, "--restart-backoff", type=types.seconds, default=1.0, metavar="S", help=backoff)
    preempt = "signal that asks the ranks to write a checkpoint and stop (default TERM)"
    default = environment.NPU_DEVICE_PREEMPT_SIGNAL.raw() or "TERM"
    _add(
        again,
        "--preempt-signal",
        type=types.preempt_signal,
        default=default,
        metavar="SIG",
        help=preempt,
    )
    limit = environment.NPU_DEVICE_PREEMPT_TIMEOUT.raw() or "25"
    within = "seconds that the ranks have to do that (default 25)"
    _add(
        again,
        "--preempt-timeout",
        type=types.preempt_seconds,
        default=limit,
        metavar="S",
        help=within,
    )


def _add(target: argparse._ActionsContainer, *names: str, **settings: Any) -> None:
    """Add an option, and its spelling with underscores, which torchrun accepts too; the help doesn't show that."""
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
        parser.error(
            f"{script} is a directory; name a .py file or a program, or use -m for a package"
        )
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
        parser.error(
            f"no such script or program: {script} (looked in {os.getcwd()} and on PATH; for a module: -m)"
        )
    return (program, *arguments)
