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
from npu_device._src.machine.core_sets import BINDINGS, NONE
from npu_device._src.machine.topology import read_machine
from npu_device._src.wording import counted
from npu_device.launch import argument_types as types
from npu_device.launch.argument_types import AUTO, HostSlots, add_options

DEFAULT_PORT = 29688  # the port that Ascend's own launch scripts use for the chief
LOOPBACK = frozenset(("localhost", "127.0.0.1"))
INSTEAD_OF_TUNING = (
    "What to do: trace the script with two splits, npurun -n 2 --trace a train.py and NPU_DEVICE_SPLIT=25%,25%,25%,25% "
    "npurun -n 2 --trace b train.py, and compare them with npurun trace a b"
)
_NUMBERS = ("-n", "-np", "--nproc-per-node", "--nproc_per_node")

_RUN_TEXTS: dict[str, Any] = {
    "prog": "npurun",
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "usage": """\
npurun [-n N] [options] [-m] script [argument ...]
       npurun check [options] | verify script | speed script | port script | trace DIR | docs""",
    "description": """\
Start a script as several ranks, forward their output, and stop all of them when one fails.

commands, as the first word (npurun ./trace runs a program of that name):
  check         check hosts and network, without a script: would training work?
  verify        run a script for a few steps as one process and on N ranks: does it train right?
  speed         time a script as one process and on several numbers of ranks: is it faster?
  port          make a script of ordinary TensorFlow run on many ranks
  trace DIR     report on the trace that --trace has written
  docs [NAME]   show a page of the documentation""",
    "epilog": """\
examples:
  npurun -n 2 train.py --batch_size 64             two ranks on this host
  npurun --hosts hostA:8,hostB:8 train.py          both hosts from here, over ssh

Options of npurun go before the script; everything after it belongs to the script.""",
}
# Options that only a script has, by the names of their fields
_OF_SCRIPTS = """
script module trace horovod replicate shard_optimizer max_restarts max_preemptions max_resizes restart_backoff
preempt_signal preempt_timeout
"""


class _CheckHelp(argparse.RawDescriptionHelpFormatter):
    """The help of ``npurun check``: takes the options of a training run, but leaves those of a script out."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in _OF_SCRIPTS.split():
            super().add_argument(action)


_CHECK_TEXTS: dict[str, Any] = {
    "prog": "npurun check",
    "formatter_class": _CheckHelp,
    "usage": "npurun check [-n N] [options]",
    "description": """\
Check hosts and network, without a script: would training work, and how fast do
the ranks communicate? Give the options of the training run. It takes about half
a minute. Exit code 0: training would work; 2: usage; else: it would not.""",
    "epilog": """\
examples:
  npurun check -n 2                                this host
  npurun check --hosts hostA:8,hostB:8             both hosts from here, over ssh""",
}


@dataclass(frozen=True)
class Options:
    command: Sequence[str]  # argument vector of every rank, ready to be executed
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
    # Number of nodes with which the job goes on; ``nnodes`` unless the user says otherwise.
    fewest_nodes: int
    max_restarts: int
    max_preemptions: int | None  # how often a job outlives them; None for any number
    max_resizes: int | None  # how often nodes join a running job; None for any number
    restart_backoff: float  # seconds before the first restart; each further one without a new checkpoint doubles them
    rejoin_timeout: float  # seconds that nodes wait for each other before an attempt
    preempt_signal: int  # asks the ranks for a checkpoint and a resumable end
    preempt_timeout: float  # seconds that the ranks have for this checkpoint and their end
    hosts: Sequence[str]  # reached by ssh; empty if npurun is started on each node
    horovod: bool
    replicate: bool
    shard_optimizer: bool
    seed: int  # seed of all ranks, with ``replicate``
    bind_to: str  # one of ``core_sets.BINDINGS``

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
    def takes_nodes(self) -> bool:
        """Return True if nodes may join the running job."""
        return self.fewest_nodes < self.nnodes and self.max_resizes != 0

    @property
    def restarts_hosts(self) -> bool:
        """Return True if ``npurun --hosts`` starts the npurun of a lost host again."""
        return self.nodes_meet or self.max_restarts > 0


def parse(argv: Sequence[str]) -> Options:
    """Return the options of a command line, or exit with a message."""
    parser = _parser(is_check=list(argv[:1]) == ["--check"])
    try:
        return _options(parser.parse_args(argv))
    except ValueError as error:
        parser.error(str(error))


def _options(namespace: argparse.Namespace) -> Options:
    """Return the options that complete these arguments; ValueError if they contradict each other."""
    slots = _hosts(namespace)
    # Hosts are read before the platform's variables, which describe a job that is started on every node.
    if not slots:
        _take_from_platform(namespace)
    fewest_nodes, nnodes = namespace.nnodes
    if namespace.tee and namespace.log_dir is None:
        raise ValueError(
            "--tee writes to the console as well as to the files of --log-dir: give --log-dir too"
        )
    if nnodes > 1 and not slots:
        _require_node(namespace)
    if namespace.tune:
        raise ValueError(
            f"--tune is gone: four equal segments were as fast as what it found. {INSTEAD_OF_TUNING}"
        )
    restarts = namespace.max_restarts or namespace.max_preemptions or fewest_nodes < nnodes
    if namespace.check and (namespace.script or namespace.trace or restarts):
        raise ValueError(
            "check runs its own script once: omit the script, --trace, --max-restarts, --max-preemptions and MIN:MAX "
            "nodes"
        )
    if namespace.nproc_per_node == AUTO:
        namespace.nproc_per_node = 0  # each of --hosts counts its own GPUs
        if not slots:
            namespace.nproc_per_node = types.ranks_per_node()
            if not namespace.check and not types.visible_gpus():
                _hint_at_more_ranks()
    # The hint is for a job of one rank: whoever has asked for more has put the option in the right place.
    if namespace.nproc_per_node == 1 == nnodes:
        _hint_at_options_after_script(namespace.module, namespace.script)
    namespace.node_rank = namespace.node_rank or 0
    if not 0 <= namespace.node_rank < nnodes:
        raise ValueError(
            f"--node-rank {namespace.node_rank}: with --nnodes {nnodes} it is 0 to {nnodes - 1}"
        )
    namespace.command = ()
    if not namespace.check:
        namespace.command = _command(namespace.module, namespace.script)
        if namespace.replicate:
            namespace.command = _replicating(namespace)
    namespace.hosts = tuple(host for host, _ in slots)
    namespace.fewest_nodes = fewest_nodes
    namespace.nnodes = nnodes
    namespace.master_addr = namespace.master_addr or "127.0.0.1"
    # The names of the options are the fields of ``Options``.
    return Options(**{field.name: getattr(namespace, field.name) for field in fields(Options)})


def _require_node(namespace: argparse.Namespace) -> None:
    """Require what npurun has to know on each of several nodes."""
    options = {"--node-rank": namespace.node_rank, "--master-addr": namespace.master_addr}
    names = " and ".join(name for name, setting in options.items() if setting is None)
    if names:
        nnodes = namespace.nnodes[1]
        raise ValueError(
            f"--nnodes {nnodes} needs {names} too: run npurun once on every node, with --node-rank 0 to "
            f"{nnodes - 1} and everywhere the same address of node 0 as --master-addr"
        )


def _replicating(namespace: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that trains an unchanged Keras script on all ranks."""
    if namespace.horovod:
        raise ValueError(
            "--replicate is for scripts without calls of Horovod: give either --replicate or --horovod"
        )
    python, *words = namespace.command
    if python != sys.executable:
        raise ValueError("--replicate takes a .py file, or a module with -m")
    program = "npu_device._src.replicate.main_program"
    return (python, "-u", "-m", program, str(namespace.seed), *words[1:])


def _take_from_platform(namespace: argparse.Namespace) -> None:
    """Complete the arguments as Kubeflow's torch runtime (``PET_*``) or else SkyPilot says; the command line wins.

    Not the number of ranks per node: ``PET_NPROC_PER_NODE`` is the number of CPUs there.
    """
    variable = "SKYPILOT_NUM_NODES"
    settings = {}
    if environment.PET_NNODES.get() is not None:
        variable = "PET_NNODES"
        settings = {
            "nnodes": types.nodes(environment.PET_NNODES.raw() or ""),
            "node_rank": environment.PET_NODE_RANK.get(),
            "master_addr": environment.PET_MASTER_ADDR.get(),
            "master_port": environment.PET_MASTER_PORT.get(),
        }
    elif (nodes := environment.SKYPILOT_NUM_NODES.get()) is not None:
        addresses = (environment.SKYPILOT_NODE_IPS.get() or "").split()
        settings = {
            "nnodes": (nodes, nodes),
            "node_rank": environment.SKYPILOT_NODE_RANK.get(),
            "master_addr": next(iter(addresses), None),
        }
    namespace.nnodes = namespace.nnodes or settings.get("nnodes", (1, 1))
    # On one node npurun needs nothing of the platform.
    if not settings or namespace.nnodes[1] == 1:
        return
    for name, setting in settings.items():
        if getattr(namespace, name) is None:
            setattr(namespace, name, setting)
    # Said because nothing on the command line shows where the numbers come from.
    if namespace.node_rank is not None and namespace.master_addr is not None:
        print(
            f"npurun: {variable} and others of the platform say that this is node {namespace.node_rank} of "
            f"{namespace.nnodes[1]}, and node 0 is {namespace.master_addr}",
            file=sys.stderr,
        )


def _hosts(namespace: argparse.Namespace) -> HostSlots:
    """Return the hosts of --hosts or --hostfile, and complete the other arguments from them."""
    total = namespace.np
    if total is not None and (namespace.nproc_per_node != AUTO or namespace.nnodes is not None):
        _refuse_both_counts(namespace)
    if namespace.hosts is None and namespace.hostfile is None:
        namespace.nproc_per_node = total or namespace.nproc_per_node
        return []
    if namespace.hosts is not None and namespace.hostfile is not None:
        raise ValueError("--hosts and --hostfile name the same thing: give one of them")
    if namespace.node_rank is not None:
        raise ValueError(
            "--node-rank belongs to an npurun that is started on each node: leave --hosts out"
        )
    option = "--hosts"
    try:
        if namespace.hostfile is None:
            hosts = types.parse_hosts(namespace.hosts)
        else:
            option = "--hostfile"
            hosts = types.read_hosts(namespace.hostfile)
        if total is not None:
            hosts = types.filled_hosts(hosts, total)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from None
    numbers = {number for _, number in hosts if number is not None}
    if namespace.nproc_per_node != AUTO:
        numbers.add(namespace.nproc_per_node)
    if len(numbers) > 1:
        raise ValueError(
            f"npurun starts the same number of ranks on each host; found {sorted(numbers)}"
        )
    namespace.nproc_per_node = next(iter(numbers), AUTO)
    # ssh takes USER@HOST, but the ranks connect to an address.
    _complete_nodes(namespace, [host.rpartition("@")[2] for host, _ in hosts])
    return hosts


def _refuse_both_counts(namespace: argparse.Namespace) -> None:
    total = namespace.np
    _, nnodes = namespace.nnodes or (1, 1)
    per_node = f"-n {namespace.nproc_per_node}"
    if nnodes > 1:
        per_node = f"-n {max(1, total // nnodes)} --nnodes {nnodes}"
    raise ValueError(
        f"-np {total} counts the ranks of all hosts, -n those of each node. Give one of them: npurun -np {total} "
        f"-H a:N,b:N; or npurun {per_node}"
    )


def _complete_nodes(namespace: argparse.Namespace, hosts: Sequence[str]) -> None:
    """Set the number of nodes and the address of node 0."""
    fewest_nodes, nnodes = namespace.nnodes or (1, 1)
    if nnodes not in (1, len(hosts)):
        raise ValueError(f"--nnodes {nnodes}: the list has {counted(len(hosts), 'host')}")
    if nnodes == 1:
        fewest_nodes = len(hosts)
    namespace.nnodes = (fewest_nodes, len(hosts))
    if namespace.master_addr is not None:
        return
    # Other hosts would look for node 0 on themselves.
    remote = [host for host in hosts[1:] if host not in LOOPBACK]
    if hosts[0] in LOOPBACK and remote:
        raise ValueError(
            f"{hosts[0]} is another host for {remote[0]}, and the ranks meet on the first host of the list: give its "
            "name or address there, or as --master-addr"
        )
    if len(hosts) > 1:
        namespace.master_addr = hosts[0]


def _hint_at_options_after_script(module: bool, words: Sequence[str]) -> None:
    """Print a hint on stderr if the script's first argument looks like the number of ranks."""
    # The third word must be a number, or -n is probably an option of the script.
    if len(words) > 2 and words[1] in _NUMBERS and words[2].isdecimal():
        script = words[0]
        if module:
            script = f"-m {script}"
        print(
            f"npurun: {words[1]} {words[2]} comes after {words[0]}, so the script gets it. For {words[2]} "
            f"ranks: npurun -n {words[2]} {script}",
            file=sys.stderr,
        )


def _hint_at_more_ranks() -> None:
    """Print a hint on stderr if this host has several parts, on which TensorFlow alone may be slow."""
    machine = read_machine()
    for level, noun in (("numa", "NUMA nodes"), ("l3cache", "L3 caches")):
        count = len(machine.domains(level))
        if count > 1:
            print(
                f"npurun: one rank, without GPUs. This host has {count} {noun}, and more ranks may be faster: npurun "
                "speed measures that",
                file=sys.stderr,
            )
            return


def _parser(is_check: bool) -> argparse.ArgumentParser:
    texts = _RUN_TEXTS
    if is_check:
        texts = _CHECK_TEXTS
    parser = argparse.ArgumentParser(
        **texts,
        # An abbreviation that works today breaks when a second option begins with it.
        allow_abbrev=False,
    )
    # Known until 0.3.0, to name what replaces them: --tune, and --check, now npurun check.
    add_options(
        parser,
        """
        -n --nproc-per-node N  ranks per node; auto (default): one per GPU, or one
        -m --module            the script is the name of a module, as with python -m
        --log-dir DIR          write to DIR/rank<N>.log, not to the console
        --tee                  with --log-dir: write to the console as well
        --job-id ID            name of the job (default $JOB_ID, else a new one)
        --grace S              seconds until running ranks are killed (default 5)
        --trace DIR            write a trace of the iterations and a report to DIR
        --tune
        --horovod              let import horovod find npu_device.horovod
        --replicate            train an unchanged Keras script (--seed N: the seed)
        --shard-optimizer      divide updates among the ranks
        --seed N
        --check
        --bind-to WHAT         bind ranks to core, l3cache, numa, socket, auto; none
        """,
        nproc_per_node=types.ranks,
        job_id=types.job_id,
        grace=types.seconds,
        seed=types.count,
        bind_to=BINDINGS,
    )
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
    parser.set_defaults(
        nproc_per_node=AUTO,
        grace=5.0,
        seed=1,
        bind_to=NONE,
        rejoin_timeout=300.0,
        max_restarts=0,
        restart_backoff=1.0,
        preempt_signal=environment.NPU_DEVICE_PREEMPT_SIGNAL.raw() or "TERM",
        preempt_timeout=environment.NPU_DEVICE_PREEMPT_TIMEOUT.raw() or "25",
    )
    return parser


def _add_nodes(group: argparse._ActionsContainer) -> None:
    add_options(
        group,
        f"""
        --hosts A:N,B:N     start all nodes from here, over ssh (also -H)
        --hostfile FILE     the same, from lines such as: A slots=N
        -np N               number of ranks on all hosts together
        --nnodes N          number of nodes (default 1); MIN:MAX: wait for MAX nodes, run with MIN or
                            more
        --node-rank R       number of this node, from 0
        --master-addr ADDR  address or name of node 0 (one node: 127.0.0.1)
        --master-port PORT  port of node 0 where the ranks meet (default: the first of
                            NPU_DEVICE_PORT_RANGE, else {DEFAULT_PORT}; one node: a free one)
        --rejoin-timeout S  seconds that nodes wait for each other, and --hosts tries a lost host
                            (default 300)
        """,
        np=types.positive,
        nnodes=types.nodes,
        node_rank=int,
        master_port=types.port,
        rejoin_timeout=types.seconds,
    )
    group.add_argument("-H", dest="hosts", help=argparse.SUPPRESS)


def _add_failures(group: argparse._ActionsContainer) -> None:
    add_options(
        group,
        """
        --max-restarts N      start a failed job again (default 0)
        --max-preemptions N   continue N times without a node (default: any; 0: end)
        --max-resizes N       let nodes join N times (default: any; 0: at restarts)
        --restart-backoff S   seconds before a restart, doubled up to 60 (default 1)
        --preempt-signal SIG  asks for a checkpoint and a stop (default TERM)
        --preempt-timeout S   seconds that the ranks have to do that (default 25)
        """,
        max_restarts=types.count,
        max_preemptions=types.count,
        max_resizes=types.count,
        restart_backoff=types.seconds,
        preempt_signal=types.preempt_signal,
        preempt_timeout=types.preempt_seconds,
    )


def _command(module: bool, words: list[str]) -> tuple[str, ...]:
    # argparse keeps the separator with the words that it leaves to us.
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError("the script is missing")
    script, *arguments = words
    if module:
        return (sys.executable, "-u", "-m", script, *arguments)
    if os.path.isdir(script):
        raise ValueError(
            f"{script} is a directory; name a .py file or a program, or use -m for a package"
        )
    if script.endswith(".py"):
        if not os.path.isfile(script):
            raise ValueError(f"no such script: {script} (looked for it in {os.getcwd()})")
        return (sys.executable, "-u", script, *arguments)
    if os.path.isfile(script):
        if not os.access(script, os.X_OK):
            raise ValueError(
                f"{script} is neither .py nor executable: chmod +x it, or name the interpreter (npurun sh {script})"
            )
        # Absolute, since a name without a slash would be looked for on PATH.
        return (os.path.abspath(script), *arguments)
    program = shutil.which(script)
    if program is None:
        raise ValueError(
            f"no such script or program: {script} (looked in {os.getcwd()} and on PATH; for a module: -m)"
        )
    return (program, *arguments)
