"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and says where they diverge."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from npu_device._src.cluster.time_limits import VERIFY_SECONDS
from npu_device._src.machine.free_memory import usable_memory
from npu_device._src.verify.file_shadow import changed_since
from npu_device._src.verify.plan import PlannedProcess
from npu_device.launch import script_runs
from npu_device.launch.argument_types import positive

_RUNNER = "npu_device._src.verify.runner"
# The exit code of ``verdict.py``, which is imported later, also for what goes wrong here: Python's own code would mean
# that the ranks differ.
_NOT_COMPARABLE = 3


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; return the exit code."""
    try:
        return _main(arguments)
    except OSError as error:
        script_runs.say("verify", f"failed: {error}")
    except Exception:
        traceback.print_exc()
    return _NOT_COMPARABLE


def _main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    sizes = [options.n or 2]
    if not options.n and usable_memory() > 3 * script_runs.RANK_BYTES:
        sizes = [2, 3]
    if options.hosts:
        parser.error("--hosts: verify runs on this host only: its ranks are compared through files")
    if options.n == 1:
        parser.error("-n 1: must be 2 or more, to be compared with one process")
    script_runs.check(parser, options, sizes[-1])
    if options.keep and _is_used(options.keep):
        parser.error(f"--keep {options.keep}: must be a new or empty directory")
    if options.html and not Path(options.html).resolve().parent.is_dir():
        parser.error(f"--html {options.html}: there is no such directory")
    if options.html and Path(options.html).is_dir():
        parser.error(f"--html {options.html}: is a directory")
    with tempfile.TemporaryDirectory(prefix="npurun-verify-") as directory:
        # Absolute, since the script may change its folder.
        return _verify(options, sizes, Path(options.keep or directory).resolve())


def _is_used(path: str) -> bool:
    """Return True if there is anything at a path but an empty directory."""
    return os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path))


def _verify(options: argparse.Namespace, sizes: Sequence[int], directory: Path) -> int:
    if not options.json:
        ranks = " and ".join(map(str, sizes))
        script_runs.announce(
            "verify",
            f"{options.script}: one process twice, then {ranks} ranks, {options.steps} steps each",
        )
    began = time.time()
    start = PlannedProcess(
        str(directory), options.steps, options.module, options.replicate, options.seconds, sizes
    )
    try:
        problem = script_runs.run_all(_RUNNER, start, options, VERIFY_SECONDS)
    except subprocess.TimeoutExpired:
        problem = (
            f"the script didn't make its steps in {VERIFY_SECONDS / 60:.0f} minutes; see its output "
            "with --keep DIR"
        )
    if problem:
        script_runs.say("verify", problem)
        return _NOT_COMPARABLE
    # Imported here, since a mistake in the command line shouldn't wait for numpy.
    from npu_device._src.verify import report
    from npu_device._src.verify.verdict import judge

    verdict = judge(start.stages())
    script_folder = Path(options.script).resolve().parent
    changed = changed_since(began, [script_folder, Path.cwd()], directory)
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


def _parser() -> argparse.ArgumentParser:
    parser = script_runs.make_parser(
        "verify",
        "-n N",
        "Run a script for a few steps as one process and on N ranks, and say where they diverge and why. "
        "Exit code 0: the same; 1: it differs; 2: usage; 3: not comparable.",
        """
        -n N         ranks (default 2, and 3 if there is memory)
        --steps K    steps of every optimizer (default 5)
        --seconds S  for more phases, after the first step (default 30)
        --html FILE  write a page with a picture of the ratios, too
        --keep DIR   keep records, output and written files in DIR
        --hosts A:N,B:N
        """,
        n=positive,
        steps=positive,
        seconds=positive,
    )
    parser.set_defaults(steps=5, seconds=30)
    return parser
