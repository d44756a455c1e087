"""``npurun speed``: runs a script for some steps as one process and on several numbers of ranks, and compares them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path

from npu_device._src.horovod import modules
from npu_device._src.machine.core_sets import AUTO, BINDINGS, NONE, core_sets
from npu_device._src.machine.topology import read_machine
from npu_device._src.speed.timed_process import LEFT_OUT, Setup, TimedProcess
from npu_device._src.verify.file_shadow import COVERED
from npu_device._src.verify.plan import PROBLEM
from npu_device.launch.argument_types import positive
from npu_device.launch.verify import RANK_BYTES, variables_of_runs

_RUNNER = "npu_device._src.speed.measured_runs"
_END_SECONDS = 30  # after the limit of time, for processes that are about to end


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; return the exit code."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = options.n or _sizes(memory)
    if options.hosts:
        parser.error("--hosts: speed runs on this host only")
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script} (looked for it in {os.getcwd()})")
    if sizes[-1] * RANK_BYTES > memory:
        parser.error(
            f"{sizes[-1]} ranks need more memory than the {memory >> 30} GiB of this machine"
        )
    # Leaving by an exception ends the processes of the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="npurun-speed-") as directory:
        return _measure(options, _setups(sizes, options.bind_to), Path(directory).resolve())


def _sizes(memory: int) -> list[int]:
    """Return the numbers of ranks to try: powers of two and one rank for each NUMA node, as far as there is room."""
    # More ranks than cores only take turns.
    cores = len(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    sizes = {nodes or 1, *(1 << power for power in range(cores.bit_length()))}
    return sorted(size for size in sizes | {1, 2} if size * RANK_BYTES <= memory)


def _setups(sizes: Sequence[int], binding: str | None) -> list[Setup]:
    """Return what is run: by default, ranks are also bound where the host has several caches or NUMA nodes."""
    if binding is not None:
        return [Setup(ranks, binding if ranks > 1 else NONE) for ranks in sizes]
    # Hosts of one cache and node have nothing to bind to.
    machine = read_machine()
    setups = []
    for ranks in sizes:
        setups.append(Setup(ranks))
        if core_sets(machine, ranks, AUTO):
            setups.append(Setup(ranks, AUTO))
    return setups


def _measure(options: argparse.Namespace, setups: Sequence[Setup], directory: Path) -> int:
    if not options.json:
        ranks = ", ".join(setup.label for setup in setups[1:])
        _say(
            f"{options.script}: one process and {ranks} ranks in turn, at most {options.minutes:g} minutes, at most "
            f"{setups[-1].ranks} ranks at once"
        )
        _say(f"your files stay as they are, as far as this covers: {COVERED}")
        _say("what the script sends to databases, object stores and trackers is sent in each run")
    start = TimedProcess(str(directory), options.steps, options.module, options.replicate)
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
    # Here, since numpy takes a while.
    from npu_device._src.speed import outcome

    left_out = {}
    path = directory / LEFT_OUT
    if path.exists():
        left_out = json.loads(path.read_text())
    timed_setups = [setup for setup in setups if setup.label not in left_out]
    measured = outcome.outcome(start, timed_setups, left_out)
    if measured.problem:
        _say(measured.problem)
        return 3
    if not measured.speedups and not code:
        reasons = "; ".join(f"{label} ranks: {why}" for label, why in left_out.items())
        _say(
            f"there was no whole round in {options.minutes:g} minutes (--minutes). {reasons}".strip()
        )
        return 3
    if options.json:
        print(json.dumps(asdict(measured)))
    else:
        print(outcome.text(measured, options.steps))
    return code


def _run(options: argparse.Namespace, start: TimedProcess, setups: Sequence[Setup]) -> str:
    """Run all processes of a script; return what is wrong, "" if nothing is."""
    variables = variables_of_runs()
    if options.horovod:
        variables.update(modules.variables(variables))
    limit = 60.0 * options.minutes
    settings = asdict(start)
    settings.update(setups=list(map(astuple, setups)), limit=limit, rounds=options.rounds)
    runner = (sys.executable, "-u", "-m", _RUNNER, json.dumps(settings))
    process = subprocess.Popen(
        [*runner, options.script, *options.arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(limit + _END_SECONDS)
    except subprocess.TimeoutExpired:
        code = 0  # what has been measured is there
    finally:
        # The runner has made a group of its own, with all ranks in it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    problem = Path(start.directory, PROBLEM)
    if problem.exists():
        return problem.read_text()
    if code:
        return f"the process of the script ended with {code}"
    return ""


def _numbers(text: str) -> list[int]:
    """Return numbers of ranks, with 1 first."""
    numbers = sorted({1, *map(positive, text.split(","))})
    if len(numbers) == 1:
        raise argparse.ArgumentTypeError("must name a number of ranks above 1, such as 1,2,4")
    return numbers


def _minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument(
        "--replicate",
        action="store_true",
        help="measure npurun --replicate, of an unchanged script",
    )
    parser.add_argument(
        "--horovod",
        action="store_true",
        help="measure npurun --horovod, of a script that imports it",
    )
    parser.add_argument("--hosts", help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="a .py file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def _say(text: str) -> None:
    print(f"npurun speed: {text}", file=sys.stderr, flush=True)
