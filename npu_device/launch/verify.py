"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and says where they diverge."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from npu_device._src import environment
from npu_device._src.cluster.time_limits import VERIFY_SECONDS
from npu_device._src.horovod import modules
from npu_device._src.verify.file_shadow import COVERED, changed_since
from npu_device._src.verify.plan import PROBLEM, PlannedProcess
from npu_device.launch.argument_types import positive

RANK_BYTES = 2 << 30  # of a rank with TensorFlow and a small model
_RUNNER = "npu_device._src.verify.runner"
_FOR_RANKS = {
    "NPU_DEVICE_STATEMENT": "off",
    "NPU_DEVICE_LAUNCHER": "off",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # several processes share a GPU
}
_NOT_OF_JOBS = ("NPU_DEVICE_", "TF_", "CUDA_", "NVIDIA_", "GRPC_", "MALLOC_")
"""How variables begin that don't describe a job, and so stay."""


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; return the exit code."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = [options.n or 2]
    if not options.n and memory > 3 * RANK_BYTES:
        sizes = [2, 3]
    if options.hosts:
        parser.error("--hosts: verify runs on this host only: its ranks are compared through files")
    if options.n == 1:
        parser.error("-n 1: must be 2 or more, to be compared with one process")
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script} (looked for it in {os.getcwd()})")
    if sizes[-1] * RANK_BYTES > memory:
        parser.error(
            f"{sizes[-1]} ranks need more memory than the {memory >> 30} GiB of this machine"
        )
    if options.keep and _is_used(options.keep):
        parser.error(f"--keep {options.keep}: must be a new or empty directory")
    if options.html and not Path(options.html).resolve().parent.is_dir():
        parser.error(f"--html {options.html}: there is no such directory")
    # Leaving by an exception ends the processes of the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="npurun-verify-") as directory:
        # Absolute, since the script may change its folder.
        return _verify(options, sizes, Path(options.keep or directory).resolve())


def _is_used(path: str) -> bool:
    """Return True if there is anything at a path but an empty directory."""
    return os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path))


def _verify(options: argparse.Namespace, sizes: Sequence[int], directory: Path) -> int:
    if not options.json:
        ranks = " and ".join(map(str, sizes))
        _say(f"{options.script}: one process twice, then {ranks} ranks, {options.steps} steps each")
        _say(f"your files stay as they are, as far as this covers: {COVERED}")
    begin = time.time()
    start = PlannedProcess(
        str(directory), options.steps, options.module, options.replicate, options.seconds
    )
    problem = _run(start, sizes, [options.script, *options.arguments], horovod=options.horovod)
    if problem:
        _say(problem)
        return 3
    from npu_device._src.verify import report

    verdict = report.judge(start.runs(sizes))
    changed = changed_since(begin, {Path.cwd(), Path(options.script).resolve().parent}, directory)
    if changed:
        verdict.notes.append(
            f"these files changed, by calls that aren't covered: {', '.join(changed[:5])}"
        )
    if options.json:
        print(json.dumps(asdict(verdict)))
    else:
        print(report.text(verdict))
    if options.html:
        Path(options.html).write_text(report.page(verdict), encoding="utf-8")
    return verdict.code


def _run(
    start: PlannedProcess, sizes: Sequence[int], words: Sequence[str], *, horovod: bool
) -> str:
    """Run a script with its arguments as all processes; return what is wrong, "" if nothing is."""
    variables = variables_of_runs()
    if horovod:
        variables.update(modules.variables(variables))
    settings = json.dumps({**asdict(start), "sizes": sizes})
    Path(start.directory).mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", _RUNNER, settings, *words],
        env=variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(VERIFY_SECONDS)
    except subprocess.TimeoutExpired:
        return f"the script didn't make its steps in {VERIFY_SECONDS / 60:.0f} minutes; see its output with --keep DIR"
    finally:
        with contextlib.suppress(ProcessLookupError):
            # The whole group, with all processes that it has forked.
            os.killpg(process.pid, signal.SIGKILL)
    problem = Path(start.directory, PROBLEM)
    if problem.exists():
        return problem.read_text()
    if code:
        return f"the process of the script ended with {code}"
    return ""


def variables_of_runs() -> dict[str, str]:
    """Return the environment without what describes a job: each run gets a job of its own."""
    known_names = [variable.name for variable in environment.ALL]
    names_of_jobs = {name for name in known_names if not name.startswith(_NOT_OF_JOBS)}
    names_of_jobs |= {"TF_CONFIG", "NPU_DEVICE_HUB"}
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **_FOR_RANKS}
    for name in names_of_jobs:
        variables.pop(name, None)
    return variables


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npurun verify",
        usage="npurun verify [-n N] [options] [-m] script [argument ...]",
        description="Run a script for a few steps as one process and on N ranks, and say where they diverge and why. "
        "Exit code 0: the same; 1: it differs; 2: usage; 3: not comparable.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", type=positive, metavar="N", help="ranks (default 2, and 3 if there is memory)"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=5,
        metavar="K",
        help="steps of every optimizer (default 5)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=30,
        metavar="S",
        help="for more phases, after the first step (default 30)",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with a picture of the ratios, too"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep records, output and written files in DIR"
    )
    parser.add_argument(
        "--replicate", action="store_true", help="verify npurun --replicate, of an unchanged script"
    )
    parser.add_argument(
        "--horovod",
        action="store_true",
        help="verify npurun --horovod, of a script that imports it",
    )
    parser.add_argument("--hosts", help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="a .py file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def _say(text: str) -> None:
    print(f"npurun verify: {text}", file=sys.stderr, flush=True)
