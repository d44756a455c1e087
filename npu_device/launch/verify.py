"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and says where they diverge."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.verify.file_shadow import COVERED, state_of
from npu_device._src.verify.process_settings import CODE, FAILED, LOG, START, STEPS, Settings, written
from npu_device.launch import child_environment
from npu_device.launch.attempt import USAGE

_LIMIT_SECONDS = 1800.0
_RANK_BYTES = 2 << 30  # of a rank with TensorFlow and a small model
_RUNNER = "npu_device._src.verify.runner"
_TAIL_LINES = 25


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; return the exit code."""
    given = _parser().parse_args(list(arguments))
    words = given.script[1:] if given.script[:1] == ["--"] else given.script
    if not words:
        return _usage("the script is missing")
    if not given.module and not os.path.isfile(words[0]):
        return _usage(f"no such script: {words[0]} (looked for it in {os.getcwd()})")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = [given.n] if given.n else [size for size in (2, 3) if size == 2 or size * _RANK_BYTES < memory]
    if max(sizes) * _RANK_BYTES > memory:
        return _usage(f"{max(sizes)} ranks need more memory than the {memory >> 30} GiB of this machine")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so end the script's processes
    with tempfile.TemporaryDirectory(prefix="npurun-verify-") as directory:
        return _verify(given, words, sizes, Path(given.keep or directory).resolve())


def _verify(given: argparse.Namespace, words: Sequence[str], sizes: Sequence[int], directory: Path) -> int:
    runs = plan(directory, sizes, given.steps, module=given.module, replicate=given.replicate)
    if not given.json:
        _say(f"{words[0]}: one process twice, then {' and '.join(map(str, sizes))} ranks, {given.steps} steps each")
        _say(f"your files stay as they are, as far as this covers: {COVERED}")
    folders = [Path.cwd(), *([] if given.module else [Path(words[0]).resolve().parent])]
    before = state_of(folders)
    problem = _run(runs, words)
    if problem:
        print(f"npurun verify: {problem}", file=sys.stderr)
        return 3
    from npu_device._src.verify import report

    verdict = report.judge(runs)
    changed = sorted(path for path, state in state_of(folders).items() if before.get(path) != state)
    if changed:
        verdict.notes.append(f"these files changed, by calls that aren't covered: {', '.join(changed[:5])}")
    print(json.dumps(verdict.as_dict()) if given.json else report.text(verdict))
    if given.html:
        report.write_page(verdict, Path(given.html))
    return verdict.code


def plan(directory: Path, sizes: Sequence[int], steps: int, **how: Any) -> list[list[Settings]]:
    """Return the processes: one and its twin with changed inputs, then the ranks of each number of ranks."""
    one = Settings(str(directory), "one", steps, **how)
    runs = [[one, replace(one, run="again", perturbed=True)]]
    for size in sizes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        table = directory / f"ranks{size}.json"
        directory.mkdir(parents=True, exist_ok=True)
        table.write_text(child_environment.rank_table([0], size, "127.0.0.1", port), encoding="utf-8")
        rank = replace(one, run=f"ranks{size}", ranks=size)
        runs.append([replace(rank, rank=each, environment=_environment(table, size, each)) for each in range(size)])
    for run in [START, *(run[0].run for run in runs), "again"]:
        shutil.rmtree(directory / run, ignore_errors=True)  # kept before
    return runs


def _environment(table: Path, size: int, rank: int) -> dict[str, str]:
    return {
        "RANK_TABLE_FILE": str(table),
        "RANK_ID": str(rank),
        "RANK_SIZE": str(size),
        "ASCEND_DEVICE_ID": str(rank),
        "DEVICE_ID": str(rank),
        "JOB_ID": "verify",
    }


def _run(runs: Sequence[Sequence[Settings]], words: Sequence[str]) -> str:
    """Run the script as all processes; return what is wrong, "" if nothing is."""
    variables = {name: value for name, value in os.environ.items() if name not in _describing_a_job()}
    variables.update(
        PYTHONHASHSEED="0",
        NPU_DEVICE_FIRST_STEP_CHECK="off",
        NPU_DEVICE_STATEMENT="off",
        NPU_DEVICE_LAUNCHER="off",
        TF_CPP_MIN_LOG_LEVEL=os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        TF_FORCE_GPU_ALLOW_GROWTH="true",  # several processes share a GPU
    )
    start = replace(runs[0][0], run=START)
    start.folder.mkdir(parents=True)
    with (start.folder / LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", _RUNNER, written(runs), *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return (
                f"the script didn't make its steps in {_LIMIT_SECONDS / 60:.0f} minutes; use --keep to see its output"
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return _problem(runs, start, code)


def _problem(runs: Sequence[Sequence[Settings]], start: Settings, code: int) -> str:
    for run in runs:
        who = "one process" if run is runs[0] else f"{len(run)} ranks"
        begun = [process for process in run if (process.folder / CODE).exists()]
        failed = [process for process in begun if (process.folder / CODE).read_text() != "0"]
        failed.sort(key=_time)
        end = "The end of its output:\n"
        if failed or code:
            return f"as {who}, the script failed. {end}{_tail((*failed, start)[0])}"
        silent = [process for process in begun if '"step"' not in (process.folder / STEPS).read_text()]
        if silent or not begun:
            return f"as {who}, the script ended before its first step. {end}{_tail((*silent, start)[0])}"
    return ""


def _time(process: Settings) -> float:
    error = process.folder / FAILED
    return error.stat().st_mtime if error.exists() else 0.0


def _tail(process: Settings) -> str:
    return "\n".join((process.folder / LOG).read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _describing_a_job() -> set[str]:
    """Return the names of the variables that would make the single process a rank."""
    kept = ("NPU_DEVICE_", "TF_", "CUDA_", "NVIDIA_", "GRPC_", "MALLOC_")
    names = {variable.name for variable in environment.ALL}
    return {name for name in names if not name.startswith(kept)} | {"TF_CONFIG", "NPU_DEVICE_HUB"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npurun verify",
        usage="npurun verify [-n N] [options] [-m] script [argument ...]",
        description="Run a script for a few steps as one process and on N ranks, and say where they diverge and why. "
        "Exit code 0: the same; 1: it differs; 2: usage; 3: not comparable.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=_ranks, metavar="N", help="ranks (default 2, and 3 if there is memory)")
    parser.add_argument("--steps", type=_count, default=5, metavar="K", help="steps of every optimizer (default 5)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with a picture of the ratios, too")
    parser.add_argument("--keep", metavar="DIR", help="keep records, output and written files in DIR")
    parser.add_argument("--replicate", action="store_true", help="verify npurun --replicate, of an unchanged script")
    parser.add_argument("--hosts", help=argparse.SUPPRESS, type=_refused)
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a .py file, or with -m a module, and its arguments")
    return parser


def _refused(text: str) -> str:
    raise argparse.ArgumentTypeError("verify runs on this host only: its ranks are compared through files")


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be 2 or more; found {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; found {text!r}")
    return int(text)


def _usage(problem: str) -> int:
    print(f"npurun verify: {problem}", file=sys.stderr)
    return USAGE


def _say(text: str) -> None:
    print(f"npurun verify: {text}", file=sys.stderr, flush=True)
