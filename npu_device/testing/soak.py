"""``python -m npu_device.testing.soak``: does a job end with the same result if its ranks are killed and stopped?

Runs a training twice with ``npurun --max-restarts``: undisturbed, and with faults at random times. Then compares the
results. The script has to continue from its checkpoints (``npu.train.JobCheckpoint``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from npu_device.testing.faults import Fault, Faults

_RESTARTS = 10_000
_EPILOG = """\
example:
  python -m npu_device.testing.soak --mtbf 30 --for 900 --result {dir}/weights.npy -- \\
      -n 2 train.py --checkpoints {dir}/checkpoints --save {dir}/weights.npy

{dir} stands for a directory of its own for each of the two runs. Without --result the last lines that rank 0 prints are
compared. On several nodes, run it on each with npurun's options, and with --no-reference on all but node 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return 0 if the results are the same, 1 if not, 2 for wrong usage."""
    options = _parser().parse_args(argv)
    if not options.command:
        _parser().error("expected npurun's options and a script after --")
    base = Path(options.dir or tempfile.mkdtemp(prefix="npu_soak_"))
    print(f"soak: outputs and results are in {base}", flush=True)
    seconds = {}
    for name in ("undisturbed", "disturbed"):
        if name == "undisturbed" and options.no_reference:
            continue
        directory = base / name
        if directory.exists() and any(directory.iterdir()):
            print(f"soak: {directory} is not empty: give --dir another directory", file=sys.stderr)
            return 2
        directory.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        code, faults = _run(options, directory, disturbed=name == "disturbed")
        seconds[name] = time.monotonic() - began
        if code != 0:
            print(f"soak: the {name} run ended with exit code {code}; its output is {directory / 'output'}")
            print(_table(faults))
            return 1
    print(_table(faults))
    for name, taken in seconds.items():
        print(f"soak: {name:11} {taken:7.1f} s")
    if options.no_reference:
        return 0
    results = [_result(options, base / name) for name in ("undisturbed", "disturbed")]
    same = results[0] == results[1] and results[0] is not None
    print(f"soak: {len(faults)} fault(s); the results are {'the same' if same else 'DIFFERENT'}")
    if not same:
        for name, result in zip(("undisturbed", "disturbed"), results):
            print(f"soak:   {name}: {_shown(result)}")
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m npu_device.testing.soak",
        description="Train twice, undisturbed and with ranks that are killed and stopped, and compare the results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mtbf", type=float, default=30.0, metavar="S", help="mean time between faults in seconds (default 30)")
    add("--for", type=float, default=900.0, dest="seconds", metavar="S", help="make faults for S seconds (default 900)")
    add("--seed", type=int, default=1, help="of the faults' times, kinds and ranks (default 1)")
    add("--faults", default="kill,stop", metavar="KINDS", type=_kinds, help="kill, stop or both (default kill,stop)")
    longest = "continue a stopped rank after at most S seconds (default 5)"
    add("--longest-stop", type=float, default=5.0, metavar="S", help=longest)
    add("--result", metavar="PATH", help="file that the script writes; compared byte for byte")
    add("--dir", metavar="DIR", help="directory for results and output (default a new one)")
    add("--no-reference", action="store_true", help="don't run undisturbed, and compare nothing")
    add("command", nargs="*", metavar="-- [npurun's options] script [argument ...]")
    return parser


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= {"kill", "stop"}:
        raise argparse.ArgumentTypeError(f"{text!r}; expected kill, stop or kill,stop")
    return kinds


def _run(options: argparse.Namespace, directory: Path, disturbed: bool) -> tuple[int, list[Fault]]:
    """Run the job once; return its exit code and the faults."""
    words = [word.replace("{dir}", str(directory)) for word in options.command]
    command = [sys.executable, "-m", "npu_device.launch", "--max-restarts", str(_RESTARTS), *words]
    over = threading.Event()
    with (
        open(directory / "output", "wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as launcher,
    ):
        faults = Faults(launcher.pid, options.mtbf, options.seed, options.faults, options.longest_stop, _say)
        thread = threading.Thread(target=faults.run, args=(options.seconds, over))
        if disturbed:
            thread.start()
        try:
            code = launcher.wait()
        except BaseException:
            launcher.terminate()
            raise
        finally:
            over.set()
            if disturbed:
                thread.join()
    return code, faults.done


def _say(text: str) -> None:
    print(f"soak: {text}", flush=True)


def _table(faults: Sequence[Fault]) -> str:
    """Return one line for each fault."""
    rows = ["soak:   after  fault  rank  attempt  stopped  all ranks run again"]
    for fault in faults:
        stopped = f"{fault.stopped:5.1f} s" if fault.stopped else "      –"
        again = "the job ended" if fault.recovered is None else f"after {fault.recovered:.1f} s"
        row = f"{fault.after:6.1f} s  {fault.kind:5}  {fault.rank:4}  {fault.attempt:7}  {stopped}  {again}"
        rows.append(f"soak: {row}")
    return "\n".join(rows)


def _result(options: argparse.Namespace, directory: Path) -> bytes | None:
    """Return what is compared; None if the run has left none."""
    if options.result is None:
        lines = (directory / "output").read_bytes().splitlines()
        return next((line for line in reversed(lines) if line.startswith(b"[0] ")), None)
    path = options.result.replace("{dir}", str(directory))
    return Path(path).read_bytes() if os.path.exists(path) else None


def _shown(result: bytes | None) -> str:
    if result is None:
        return "nothing"
    return result.decode(errors="replace") if len(result) < 200 else f"{len(result)} bytes"


if __name__ == "__main__":
    sys.exit(main())
