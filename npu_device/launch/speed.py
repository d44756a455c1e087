"""``npurun speed``: runs a script for some steps as one process and on several numbers of ranks, and compares them."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from npu_device._src.machine.core_sets import AUTO, BINDINGS, NONE, core_sets
from npu_device._src.machine.free_memory import usable_memory
from npu_device._src.machine.topology import Machine, read_machine
from npu_device._src.speed.timed_process import Setup, TimedProcess
from npu_device._src.wording import counted
from npu_device.launch import script_runs
from npu_device.launch.argument_types import (
    HostSlots,
    minutes,
    parse_hosts,
    positive,
)

_RUNNER = "npu_device._src.speed.measured_runs"
_END_SECONDS = 30  # grace after the limit of time, for processes that are about to end


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; return the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    machine = read_machine()
    sizes = options.n or sizes_to_measure(machine, options.hosts)
    script_runs.check(parser, options, sizes[-1] // max(1, len(options.hosts)))
    try:
        setups = setups_to_measure(machine, sizes, options)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="npurun-speed-") as directory:
        return _measure(options, setups, Path(directory).resolve())


def sizes_to_measure(machine: Machine, hosts: HostSlots) -> list[int]:
    """Return the numbers of ranks to try: powers of two and one rank for each NUMA node, as far as there is room."""
    most = usable_memory() // script_runs.RANK_BYTES
    # More ranks than CPUs only take turns.
    powers = range(machine.cpus.bit_length())
    sizes = {len(machine.domains("numa")), *(1 << power for power in powers)}
    if not hosts:
        # Two ranks in any case: a message tells if there is no memory for them.
        return sorted({1, 2, *(size for size in sizes if size <= most)})
    # Only the number of ranks that the user gives is known of other hosts.
    limit = min(number or 1 for _, number in hosts)
    per_host = {1, limit, *(size for size in sizes if size < limit)}
    return sorted({1, *(size * len(hosts) for size in per_host)})


def setups_to_measure(
    machine: Machine, sizes: Sequence[int], options: argparse.Namespace
) -> list[Setup]:
    """Return what is run, after one process; by default, ranks are also bound where that makes a difference.

    Raises:
        ValueError: a number of ranks that the user gives can't be divided among the hosts, or bound to cores.
    """
    setups = [Setup(1)]
    host_count = max(1, len(options.hosts))
    for ranks in sizes[1:]:
        if ranks % host_count:
            raise ValueError(f"-n {ranks}: must be a multiple of the {host_count} hosts of --hosts")
        try:
            sets = core_sets(machine, ranks // host_count, options.bind_to or AUTO)
        except ValueError:
            if options.n:
                raise
            # Of the numbers that are tried by default, some may be left.
            continue
        setups.append(Setup(ranks, options.bind_to or NONE))
        # Hosts of one cache and node have nothing to bind to.
        if sets and not options.bind_to:
            setups.append(Setup(ranks, AUTO))
    return setups


def _measure(options: argparse.Namespace, setups: Sequence[Setup], directory: Path) -> int:
    if not options.json:
        ranks = ", ".join(setup.label for setup in setups[1:])
        # Before the first run, nothing is known about the script.
        memory = setups[-1].ranks * script_runs.RANK_BYTES >> 30
        script_runs.announce(
            "speed",
            f"{options.script}: one process and {ranks} ranks in turn, at least "
            f"{counted(options.rounds, 'round')}. Time: at most {options.minutes:g} min. Memory: some {memory} GiB "
            "for the most ranks, 2 GiB each",
        )
        script_runs.say(
            "speed",
            "what the script sends to databases, object stores and trackers is sent in each run",
        )
    start = TimedProcess(
        str(directory),
        options.steps,
        options.module,
        options.replicate,
        60.0 * options.minutes,
        setups=setups,
        rounds=options.rounds,
        horovod=options.horovod,
        shard_optimizer=options.shard_optimizer,
        hosts=[name for name, _ in options.hosts],
    )
    problem = ""
    code = 0
    try:
        problem = script_runs.run_all(_RUNNER, start, options, start.seconds + _END_SECONDS)
    except subprocess.TimeoutExpired:
        # A run hangs. The runs that finished before it are evaluated all the same.
        pass
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    # Imported here, since numpy takes a while.
    from npu_device._src.speed import outcome

    measured = outcome.load(directory)
    problem = problem or measured.problem
    if not problem and not measured.speedups[1:]:
        reasons = "; ".join(f"{label} ranks: {why}" for label, why in measured.left_out.items())
        problem = f"there was no whole round (--minutes {options.minutes:g}). {reasons}".strip()
    if problem:
        script_runs.say("speed", problem)
        return code or 3
    if options.json:
        print(json.dumps(asdict(measured)))
    else:
        print(outcome.text(measured, options.steps))
    return code


def _numbers(text: str) -> list[int]:
    """Return numbers of ranks, with 1 first."""
    numbers = sorted({1, *map(positive, text.split(","))})
    if numbers == [1]:
        raise argparse.ArgumentTypeError("must name a number of ranks above 1, such as 1,2,4")
    return numbers


def make_parser() -> argparse.ArgumentParser:
    parser = script_runs.make_parser(
        "speed",
        "-n N,N",
        "Run a script for some steps as one process with all cores and on several numbers of ranks, in "
        "turn, and say which are faster. Exit code 0: measured; 2: usage; 3: not comparable.",
        """
        -n N,N             numbers of ranks (default 1, 2, 4 and so on, as far as cores and memory reach)
        --minutes M        for all runs (default 10)
        --steps K          steps that are timed in each run, after the first ones (default 20)
        --rounds R         turns of each number of ranks, at least; with fewer than 5, nothing is decided
                           (default 5)
        --bind-to WHAT     bind ranks as npurun does (default: both ways, if the host has several caches or
                           NUMA nodes)
        --shard-optimizer  divide updates, as npurun --shard-optimizer
        --hosts A:N,B:N    ranks are a job of npurun --hosts, one process runs on this host
        """,
        n=_numbers,
        minutes=minutes,
        steps=positive,
        rounds=positive,
        bind_to=BINDINGS,
        hosts=parse_hosts,
    )
    parser.set_defaults(minutes=10, steps=20, rounds=5, hosts=[])
    return parser
