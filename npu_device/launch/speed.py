"""``npurun speed``: runs a script for some steps as one process and on several numbers of ranks, and compares them."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path

from npu_device._src.machine.core_sets import AUTO, BINDINGS, NONE, core_sets
from npu_device._src.machine.free_memory import usable_memory
from npu_device._src.machine.topology import Machine, read_machine
from npu_device._src.speed.timed_process import Setup, TimedProcess
from npu_device._src.wording import counted
from npu_device.launch import script_runs
from npu_device.launch.argument_types import parse_hosts, positive

_RUNNER = "npu_device._src.speed.measured_runs"
_END_SECONDS = 30  # grace after the limit of time, for processes that are about to end


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; return the exit code."""
    parser = make_parser()
    options = parser.parse_args(list(arguments))
    machine = read_machine()
    slots = options.hosts or [("", None)]
    sizes = options.n or sizes_to_measure(machine, slots)
    if any(ranks % len(slots) for ranks in sizes[1:]):
        parser.error(
            f"-n {','.join(map(str, sizes[1:]))}: each must be a multiple of the {len(slots)} hosts of --hosts"
        )
    script_runs.check(parser, options, sizes[-1] // len(slots))
    with tempfile.TemporaryDirectory(prefix="npurun-speed-") as directory:
        return _measure(
            options, setups_to_measure(machine, sizes, options), Path(directory).resolve()
        )


def sizes_to_measure(machine: Machine, slots: Sequence[tuple[str, int | None]]) -> list[int]:
    """Return the numbers of ranks to try: powers of two and one rank for each NUMA node, as far as there is room."""
    most = usable_memory() // script_runs.RANK_BYTES
    # More ranks than cores only take turns.
    cores = sum(len(core.cpus) for core in machine.cores)
    sizes = {len(machine.domains("numa")), *(1 << power for power in range(cores.bit_length()))}
    if not slots[0][0]:
        return sorted(size for size in sizes | {1, 2} if size <= most)
    # Only the number of ranks that the user gives is known of other hosts.
    limits = [number or 1 for _, number in slots]
    per_host = {size for size in sizes if size < min(limits)} | {1, min(limits)}
    return sorted({1, *(size * len(slots) for size in per_host)})


def setups_to_measure(
    machine: Machine, sizes: Sequence[int], options: argparse.Namespace
) -> list[Setup]:
    """Return what is run: by default, ranks are also bound where the host has several caches or NUMA nodes."""
    binding = options.bind_to
    if binding is not None:
        return [Setup(ranks, binding if ranks > 1 else NONE) for ranks in sizes]
    # ``core_sets`` is empty for hosts of one cache and node, which have nothing to bind to.
    setups = []
    for ranks in sizes:
        setups.append(Setup(ranks))
        if core_sets(machine, ranks // len(options.hosts or [""]), AUTO):
            setups.append(Setup(ranks, AUTO))
    return setups


def _measure(options: argparse.Namespace, setups: Sequence[Setup], directory: Path) -> int:
    hosts = ",".join(name for name, _ in options.hosts or ())
    if not options.json:
        ranks = ", ".join(setup.label for setup in setups[1:])
        # Before the first run, nothing is known about the script.
        memory = setups[-1].ranks * script_runs.RANK_BYTES >> 30
        _say(
            f"{options.script}: one process and {ranks} ranks in turn, at least "
            f"{counted(options.rounds, 'round')}. Time: at most {options.minutes:g} minutes. Memory: some {memory} GiB "
            "for the most ranks, 2 GiB each"
        )
        script_runs.say_what_stays("speed")
        _say("what the script sends to databases, object stores and trackers is sent in each run")
    start = TimedProcess(
        str(directory),
        options.steps,
        options.module,
        options.replicate,
        60.0 * options.minutes,
        rounds=options.rounds,
        horovod=options.horovod,
        shard_optimizer=options.shard_optimizer,
        hosts=hosts,
    )
    code = 0
    # Ctrl-C ends the runs, and shows what there is.
    try:
        problem = _run(options, start, setups)
    except KeyboardInterrupt:
        problem = ""
        code = 128 + signal.SIGINT
    if problem:
        _say(problem)
        return 3
    # Imported here, since numpy takes a while.
    from npu_device._src.speed import outcome

    measured = outcome.outcome(start, setups)
    if measured.problem:
        _say(measured.problem)
        return 3
    if not measured.speedups:
        reasons = "; ".join(f"{label} ranks: {why}" for label, why in measured.left_out.items())
        _say(f"there was no whole round (--minutes {options.minutes:g}). {reasons}".strip())
        return code or 3
    if options.json:
        print(json.dumps(asdict(measured)))
    else:
        print(outcome.text(measured, options.steps))
    return code


def _run(options: argparse.Namespace, start: TimedProcess, setups: Sequence[Setup]) -> str:
    """Run all processes of a script; return what is wrong, "" if nothing is."""
    settings = {**asdict(start), "setups": list(map(astuple, setups))}
    try:
        return script_runs.run(_RUNNER, settings, options, start.seconds + _END_SECONDS)
    except subprocess.TimeoutExpired:
        # What has been measured is in its files.
        return ""


def _numbers(text: str) -> list[int]:
    """Return numbers of ranks, with 1 first."""
    numbers = sorted({1, *map(positive, text.split(","))})
    if len(numbers) == 1:
        raise argparse.ArgumentTypeError("must name a number of ranks above 1, such as 1,2,4")
    return numbers


def _hosts(text: str) -> list[tuple[str, int | None]]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npurun speed",
        usage="npurun speed [-n N,N] [options] [-m] script [argument ...]",
        description="Run a script for some steps as one process with all cores and on several numbers of ranks, in "
        "turn, and say which are faster. Exit code 0: measured; 2: usage; 3: not comparable.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        type=_numbers,
        metavar="N,N",
        help="numbers of ranks (default 1, 2, 4 and so on, as far as cores and memory reach)",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=10, metavar="M", help="for all runs (default 10)"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=20,
        metavar="K",
        help="steps that are timed in each run, after the first ones (default 20)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=5,
        metavar="R",
        help="turns of each number of ranks, at least; with fewer than 5, nothing is decided (default 5)",
    )
    parser.add_argument(
        "--bind-to",
        choices=BINDINGS,
        metavar="WHAT",
        help="bind ranks as npurun does (default: both ways, if the host has several caches or NUMA nodes)",
    )
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="divide updates, as npurun --shard-optimizer"
    )
    parser.add_argument(
        "--hosts",
        type=_hosts,
        metavar="A:N,B:N",
        help="ranks are a job of npurun --hosts, one process runs on this host",
    )
    script_runs.add_script(parser)
    return parser


def _say(text: str) -> None:
    script_runs.say("speed", text)
