"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and says where they diverge."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from npu_device._src import environment
from npu_device._src.verify.file_shadow import COVERED, state_of
from npu_device._src.verify.process_settings import FAILED, STEPS, Settings
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
    with tempfile.TemporaryDirectory(prefix="npurun-verify-") as directory:
        return _verify(given, words, sizes, Path(given.keep or directory).resolve())


def _verify(given: argparse.Namespace, words: Sequence[str], sizes: Sequence[int], directory: Path) -> int:
    one = Settings(str(directory), "one", 1, given.steps, module=given.module)
    again = replace(one, name="again", perturbed=True)
    jobs = [replace(one, name=f"ranks{size}", ranks=size) for size in sizes]
    say = _silent if given.json else _say
    say(f"{words[0]}: one process twice, then {' and '.join(map(str, sizes))} ranks, {given.steps} steps each")
    say(f"your files stay as they are, as far as this covers: {COVERED}")
    folders = [Path.cwd(), *([] if given.module else [Path(words[0]).resolve().parent])]
    before = state_of(folders)
    for run in (one, again, *jobs):
        say(f"running as {'one process' if run.ranks == 1 else f'{run.ranks} ranks'}")
        problem = _run(run, words)
        if problem:
            print(f"npurun verify: {problem}", file=sys.stderr)
            return 3
    from npu_device._src.verify import report

    verdict = report.judge(one, again, jobs)
    changed = sorted(path for path, state in state_of(folders).items() if before.get(path) != state)
    if changed:
        verdict.notes.append(f"these files changed, by calls that aren't covered: {', '.join(changed[:5])}")
    print(json.dumps(verdict.as_dict()) if given.json else report.text(verdict))
    if given.html:
        report.write_page(verdict, Path(given.html))
    return verdict.code


def _run(run: Settings, words: Sequence[str]) -> str:
    """Run the script once; return what is wrong, "" if nothing is."""
    command = [sys.executable, "-u", "-m"]
    if run.ranks > 1:
        command += ["npu_device.launch", "-n", str(run.ranks), "-m"]
    variables = {name: value for name, value in os.environ.items() if name not in _describing_a_job()}
    variables.update(
        PYTHONHASHSEED="0",
        NPU_DEVICE_FIRST_STEP_CHECK="off",
        NPU_DEVICE_STATEMENT="off",
        NPU_DEVICE_LAUNCHER="off",
        TF_CPP_MIN_LOG_LEVEL=os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    )
    log = Path(run.directory, f"{run.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [*command, _RUNNER, run.written(), *words],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the script didn't make {run.steps} steps in {_LIMIT_SECONDS / 60:.0f} minutes; its output: {log}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    who = "one process" if run.ranks == 1 else f"{run.ranks} ranks"
    if done.returncode != 0 or any((run.folder(rank) / FAILED).exists() for rank in range(run.ranks)):
        return f"as {who}, the script failed (exit code {done.returncode}). The end of its output:\n{tail}"
    records = [run.folder(rank) / STEPS for rank in range(run.ranks)]
    if not all(record.exists() and '"step"' in record.read_text() for record in records):
        return f"as {who}, the script ended before the first step of a Keras optimizer. The end of its output:\n{tail}"
    return ""


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


def _silent(_: str) -> None:
    pass
