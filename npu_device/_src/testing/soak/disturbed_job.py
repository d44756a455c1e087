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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from npu_device._src.testing import hosts
from npu_device._src.testing.faults import SIGNALS
from npu_device._src.testing.soak import network
from npu_device._src.testing.soak.random_faults import Disturbance, RandomFaults

_RESTARTS = 10_000
_RUNS = ("undisturbed", "disturbed")
_KINDS = (*SIGNALS, *network.KINDS)
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
    missing = sorted(set(options.faults) - {*SIGNALS, *_network(options).kinds})
    if missing:
        parser.error(
            f"{', '.join(missing)}: the network of this host can't be disturbed in this way; give --hosts 2"
        )
    base = Path(options.dir or tempfile.mkdtemp(prefix="npu_soak_"))
    print(f"soak: outputs and results are in {base}", flush=True)
    seconds, faults = {}, None
    for name in _RUNS[1 if options.no_reference else 0 :]:
        directory = base / name
        if directory.exists() and any(directory.iterdir()):
            print(f"soak: {directory} is not empty: give --dir another directory", file=sys.stderr)
            return 2
        directory.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        code, faults = _run(options, directory, options.seconds if name == "disturbed" else 0.0)
        seconds[name] = time.monotonic() - began
        if code != 0:
            print(_table(faults.done))
            print(
                f"soak: the {name} run ended with exit code {code}; its output is {directory / 'output'}"
            )
            return 1
    assert faults is not None
    print(_table(faults.done))
    print(_by_kind(faults.done))
    for name, taken in seconds.items():
        print(f"soak: {name:11} {taken:7.1f} s")
    told = f"soak: {len(faults.done)} fault(s), {faults.attempt} restart(s)"
    if options.no_reference:
        print(told)
        return 0
    results = [_result(options, base / name) for name in _RUNS]
    same = results[0] == results[1] and results[0] is not None
    print(f"{told}; the results are {'the same' if same else 'DIFFERENT'}")
    if not same:
        for name, result in zip(_RUNS, results):
            print(f"soak:   {name}: {_shown(result)}")
    return 0 if same else 1


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
    kinds = f"of {', '.join(_KINDS)} (default kill,stop)"
    add("--faults", default=list(SIGNALS), metavar="KINDS", type=_kinds, help=kinds)
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


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= set(_KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}; expected some of {','.join(_KINDS)}")
    return kinds


def _network(options: argparse.Namespace) -> type[network.Here]:
    if options.hosts == 1:
        return network.Here
    kind = options.network or ("namespaces" if hosts.can_be_made() else "proxies")
    return network.Namespaces if kind == "namespaces" else network.Proxies


def _run(options: argparse.Namespace, directory: Path, seconds: float) -> tuple[int, RandomFaults]:
    """Run the job once, with faults for some seconds; return its exit code, of the first node that failed."""
    words = [word.replace("{dir}", str(directory)) for word in options.command]
    environment = dict(os.environ)
    if options.hosts > 1:
        environment.setdefault("NPU_DEVICE_SECRET", secrets.token_hex(32))
    over = threading.Event()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # so that what was made is removed
    with contextlib.ExitStack() as stack:
        between = stack.enter_context(_network(options)(options.hosts))
        launchers = []
        for node in range(options.hosts):
            output = stack.enter_context(open(directory / f"output{node or ''}", "wb"))
            command = between.command(node, _NPURUN, words)
            launcher = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            launchers.append(stack.enter_context(launcher))
        pids = [launcher.pid for launcher in launchers]
        faults = RandomFaults(
            pids, between, options.mtbf, options.seed, options.faults, options.longest, _say
        )
        thread = threading.Thread(target=faults.run, args=(seconds, over))
        thread.start()
        try:
            codes = [launcher.wait() for launcher in launchers]
        except BaseException:
            for launcher in launchers:
                launcher.terminate()
            raise
        finally:
            over.set()
            thread.join()
    return next(filter(None, codes), 0), faults


def _say(text: str) -> None:
    print(f"soak: {text}", flush=True)


def _result(options: argparse.Namespace, directory: Path) -> bytes | None:
    if options.result is None:
        lines = (directory / "output").read_bytes().splitlines()
        return next((line for line in reversed(lines) if line.startswith(b"[0] ")), None)
    path = options.result.replace("{dir}", str(directory))
    return Path(path).read_bytes() if os.path.exists(path) else None


def _shown(result: bytes | None) -> str:
    if result is None:
        return "nothing"
    return result.decode(errors="replace") if len(result) < 200 else f"{len(result)} bytes"


def _table(faults: Sequence[Disturbance]) -> str:
    rows = ["soak:   after  fault       where     for  attempt  outcome"]
    for fault in faults:
        lasted = f"{fault.seconds:4.1f} s" if fault.seconds else "     –"
        row = f"{fault.after:6.1f} s  {fault.kind:10}  {fault.where:6}  {lasted}  {fault.attempt:7}  {_outcome(fault)}"
        rows.append(f"soak: {row}")
    return "\n".join(rows)


def _by_kind(faults: Sequence[Disturbance]) -> str:
    rows = ["soak: fault       ended an attempt    ridden out"]
    for kind in dict.fromkeys(fault.kind for fault in faults):
        these = [fault for fault in faults if fault.kind == kind]
        ended, ridden = (
            _counted([fault for fault in these if fault.ended is wanted])
            for wanted in (True, False)
        )
        rows.append(f"soak: {kind:10}  {ended:18}  {ridden}")
    return "\n".join(rows)


def _outcome(fault: Disturbance) -> str:
    if not fault.ended:
        return "ridden out"
    if fault.recovered is None:
        return "the attempt ended, and no other came"
    return f"the attempt ended; all ranks run again after {fault.recovered:.1f} s"


def _counted(faults: Sequence[Disturbance]) -> str:
    lasted = sorted(fault.seconds for fault in faults if fault.seconds)
    if not lasted:
        return str(len(faults))
    span = f"{lasted[0]:.1f}" if len(lasted) == 1 else f"{lasted[0]:.1f}–{lasted[-1]:.1f}"
    return f"{len(faults)} ({span} s)"
