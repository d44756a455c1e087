"""``python -m npu_device.testing.soak``: does a job end with the same result if its ranks and its network fail?

Runs a training twice with ``npurun --max-restarts``: undisturbed, and with faults at random times. Then compares the
results. The script has to continue from its checkpoints (``npu.train.JobCheckpoint``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from npu_device._src.testing import hosts
from npu_device._src.testing.faults import SIGNALS
from npu_device._src.testing.soak import network
from npu_device._src.testing.soak.npuruns import CHANGES, Launchers
from npu_device._src.testing.soak.random_faults import Disturbance, RandomFaults

_RESTARTS = 10_000
_RUNS = ("undisturbed", "disturbed")
_FAULTS = (*SIGNALS, *network.FAULTS, *CHANGES)
_NPURUN = (sys.executable, "-m", "npu_device.launch", "--max-restarts", str(_RESTARTS))
_EPILOG = """\
examples:
  python -m npu_device.testing.soak --mtbf 30 --for 900 --result {dir}/weights.npy -- \\
      -n 2 train.py --checkpoints {dir}/checkpoints --save {dir}/weights.npy
  python -m npu_device.testing.soak --hosts 2 --faults kill,stop,drop,delay,reset,half-close -- \\
      -n 1 train.py --checkpoints {dir}/checkpoints

{dir} stands for a separate directory for each of the two runs. Without --result the last lines that rank 0 prints are
compared. On a cluster, run it on each node with npurun's options, and with --no-reference on all but node 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return 0 if the results are the same, 1 if not, 2 for wrong usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("expected options of npurun and a script after --")
    possible = {*SIGNALS, *_network(options).faults}
    if options.hosts > 1:
        possible.update(CHANGES)
    impossible = sorted(set(options.faults) - possible)
    if impossible:
        parser.error(
            f"{', '.join(impossible)}: the network of this host can't be disturbed in this way; give --hosts 2"
        )
    base = Path(options.dir or tempfile.mkdtemp(prefix="npu_soak_"))
    print(f"soak: outputs and results are in {base}", flush=True)
    # The order matters: the undisturbed run shows first whether the script works at all.
    names: Sequence[str] = _RUNS
    if options.no_reference:
        names = _RUNS[1:]
    durations = {}
    for name in names:
        directory = base / name
        if directory.exists() and any(directory.iterdir()):
            print(f"soak: {directory} is not empty: give --dir another directory", file=sys.stderr)
            return 2
        directory.mkdir(parents=True, exist_ok=True)
        # In the undisturbed run, faults are made for 0 s: its ranks are only watched.
        seconds = 0.0
        if name == "disturbed":
            seconds = options.seconds
        began = time.monotonic()
        code, faults = _run(options, directory, seconds)
        durations[name] = time.monotonic() - began
        if code != 0:
            print(_table(faults.disturbances))
            print(
                f"soak: the {name} run ended with exit code {code}; its output is {directory / 'output'}"
            )
            return 1
    print(_table(faults.disturbances))
    print(_by_fault(faults.disturbances))
    for name, duration in durations.items():
        print(f"soak: {name:11} {duration:7.1f} s")
    counts = f"soak: {len(faults.disturbances)} fault(s), {faults.attempt} restart(s)"
    if options.no_reference:
        print(counts)
        return 0
    return _compare(counts, [_outcome(options, base / name) for name in _RUNS])


def _compare(counts: str, outcomes: Sequence[bytes | None]) -> int:
    """Report whether both runs have the same result; return the exit code."""
    undisturbed, disturbed = outcomes
    if undisturbed is not None and undisturbed == disturbed:
        print(f"{counts}; the results are the same")
        return 0
    print(f"{counts}; the results are DIFFERENT")
    for name, outcome in zip(_RUNS, outcomes):
        print(f"soak:   {name}: {_short(outcome)}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m npu_device.testing.soak",
        description="Train twice, undisturbed and with faults of ranks and network, and compare the results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--mtbf",
        type=float,
        default=30.0,
        metavar="S",
        help="mean time between faults in seconds (default 30)",
    )
    add(
        "--for",
        type=float,
        default=900.0,
        dest="seconds",
        metavar="S",
        help="make faults for S seconds (default 900)",
    )
    add("--seed", type=int, default=1, help="for times, kinds and places of the faults (default 1)")
    faults = f"of {', '.join(_FAULTS)} (default kill,stop)"
    add("--faults", default=list(SIGNALS), metavar="KINDS", type=_faults, help=faults)
    longest = "end a stop, drop or delay after at most S seconds (default 5)"
    add("--longest", type=float, default=5.0, metavar="S", help=longest)
    add(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="run N nodes on this machine, with a network between them",
    )
    between = "between --hosts: namespaces (needs root) or proxies (default: namespaces if they can be made)"
    add("--network", choices=["namespaces", "proxies"], default=None, help=between)
    add("--result", metavar="PATH", help="file that the script writes; compared byte for byte")
    add("--dir", metavar="DIR", help="directory for results and output (default a new one)")
    add("--no-reference", action="store_true", help="don't run undisturbed, and compare nothing")
    add("command", nargs="*", metavar="-- [npurun's options] script [argument ...]")
    return parser


def _faults(text: str) -> list[str]:
    faults = text.split(",")
    if not set(faults) <= set(_FAULTS):
        raise argparse.ArgumentTypeError(f"{text!r}; expected some of {','.join(_FAULTS)}")
    return faults


def _network(options: argparse.Namespace) -> type[network.Here]:
    if options.hosts == 1:
        return network.Here
    if options.network == "namespaces" or (options.network is None and hosts.can_be_made()):
        return network.Namespaces
    return network.Proxies


def _run(options: argparse.Namespace, directory: Path, seconds: float) -> tuple[int, RandomFaults]:
    """Run the job once, with faults for some seconds; return its exit code, of the first node that failed."""
    # Replaced by hand, not by ``format``, since a script's arguments may have braces of their own.
    words = [word.replace("{dir}", str(directory)) for word in options.command]
    environment = dict(os.environ)
    if options.hosts > 1:
        # Nodes need a common secret, which npurun makes by itself on a single node only.
        environment.setdefault("NPU_DEVICE_SECRET", secrets.token_hex(32))
    # SIGTERM raises, so that the network between the hosts is removed.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with contextlib.ExitStack() as stack:
        fewest = options.hosts
        # Node 0 stays.
        if set(CHANGES) & set(options.faults):
            fewest = 1
        between = stack.enter_context(_network(options)(options.hosts, fewest))
        commands = [between.command(node, _NPURUN, words) for node in range(options.hosts)]
        launchers = stack.enter_context(Launchers(commands, environment, directory))
        random = Random(options.seed)
        faults = RandomFaults(
            launchers, between, options.mtbf, random, list(options.faults), options.longest
        )
        thread = threading.Thread(target=faults.run, args=(seconds,))
        thread.start()
        try:
            code = launchers.wait()
        except BaseException:
            launchers.terminate()
            raise
        finally:
            faults.job_has_ended.set()
            thread.join()
    return code, faults


def _outcome(options: argparse.Namespace, directory: Path) -> bytes | None:
    """Return the result of a run; None if there is none."""
    if options.result is None:
        lines = (directory / "output").read_bytes().splitlines()
        # Lines of rank 0 alone are compared, since the order of lines of different ranks is chance.
        return next((line for line in reversed(lines) if line.startswith(b"[0] ")), None)
    path = Path(options.result.replace("{dir}", str(directory)))
    if not path.exists():
        return None
    return path.read_bytes()


def _short(outcome: bytes | None) -> str:
    if outcome is None:
        return "nothing"
    # Weights would fill the terminal.
    if len(outcome) >= 200:
        return f"{len(outcome)} bytes"
    return outcome.decode(errors="replace")


def _table(disturbances: Sequence[Disturbance]) -> str:
    lines = ["soak:   after  fault       where     for  attempt  outcome"]
    for disturbance in disturbances:
        duration = "     –"
        if disturbance.seconds:
            duration = f"{disturbance.seconds:4.1f} s"
        lines.append(
            f"soak: {disturbance.after:6.1f} s  {disturbance.fault:10}  {disturbance.where:6}  {duration}  "
            f"{disturbance.attempt:7}  {_effect(disturbance)}"
        )
    return "\n".join(lines)


def _by_fault(disturbances: Sequence[Disturbance]) -> str:
    lines = ["soak: fault       ended an attempt    ridden out"]
    for fault in dict.fromkeys(disturbance.fault for disturbance in disturbances):
        by_end: dict[bool, list] = {True: [], False: []}
        for disturbance in disturbances:
            if disturbance.fault == fault:
                by_end[disturbance.has_ended].append(disturbance)
        lines.append(f"soak: {fault:10}  {_counted(by_end[True]):18}  {_counted(by_end[False])}")
    return "\n".join(lines)


def _effect(disturbance: Disturbance) -> str:
    if not disturbance.has_ended:
        return "ridden out"
    if disturbance.recovered is None:
        return "the attempt ended, and no other came"
    return f"the attempt ended; all ranks run again after {disturbance.recovered:.1f} s"


def _counted(disturbances: Sequence[Disturbance]) -> str:
    durations = sorted(disturbance.seconds for disturbance in disturbances if disturbance.seconds)
    if not durations:
        return str(len(disturbances))
    span = f"{durations[0]:.1f}"
    if len(durations) > 1:
        span += f"–{durations[-1]:.1f}"
    return f"{len(disturbances)} ({span} s)"
