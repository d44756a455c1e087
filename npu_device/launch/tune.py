"""``npurun --tune``: runs the script several times, for a few steps each, and compares gradient splits.

Every run is a separate npurun, stopped when its trace has enough iterations. ``tuning.trials`` decides what is tried
and what wins. On several nodes, each npurun goes through the same runs, whose ranks meet as in training.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from npu_device._src.cluster.time_limits import TRIAL_OTHERS_SECONDS, TRIAL_POLL_SECONDS, TRIAL_SILENT_SECONDS
from npu_device.launch import on_node
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import FAILED
from npu_device.launch.console import Console

if TYPE_CHECKING:
    from npu_device._src.tuning.trials import Run, Split, Tried

DIRECTORY = "npu_tune"
"""The directory for everything, in the working directory; several nodes must share it."""

_TAIL_LINES = 20
# Variables that would interfere: another way to ask for tuning, and the split to be found.
_OURS = ("AOE_MODE", "NPU_DEVICE_SPLIT")


class RunError(RuntimeError):
    """A run ended before it had made enough steps; the text includes the end of its output."""


def run(options: Options) -> int:
    """Tune the script: on each node its own ranks; node 0 prints the result."""
    # Imported here: npurun without --tune doesn't need numpy.
    from npu_device._src.tuning import trials

    console = Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory = Path(DIRECTORY).resolve()
    tried: dict[Split, Tried] = {}
    try:
        if options.world_size == 1:
            raise ValueError("a single rank reduces nothing. What to do: npurun -n 2 --tune …")
        directory.mkdir(exist_ok=True)
        console.say(f"tuning: traces and output of all runs go to {directory}")
        for one in trials.runs():
            split = "the split as it is now" if one.split is None else trials.variable(one.split)
            console.say(f"{one.name}: {split}")
            _carry_out(one, options, directory, console)
            trials.add(tried, one, directory / one.name)
        if options.node_rank == 0:
            print(trials.outcome(tried))
    except (RunError, ValueError, OSError) as error:
        console.say(f"tuning failed: {error}")
        return FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


class _Silence:
    """Tells the user that a run continues without making steps; otherwise a run that never will would go unnoticed."""

    def __init__(self, console: Console, name: str, wanted: int, log: Path) -> None:
        self._console, self._name, self._wanted, self._log = console, name, wanted, log
        self._steps = 0
        self._since = time.monotonic()
        self._patience = TRIAL_SILENT_SECONDS

    def progressed(self, steps: int) -> None:
        """Record how many steps the run has made."""
        silent = time.monotonic() - self._since
        if steps > self._steps:
            self._steps, self._since, self._patience = steps, time.monotonic(), TRIAL_SILENT_SECONDS
        elif silent > self._patience:
            self._patience *= 2
            self._console.say(
                f"{self._name}: nothing for {silent:.0f} s, {self._steps} of {self._wanted} steps traced so far. "
                "Either a step takes that long, or the script doesn't reduce gradients, or does so in a step "
                f"that XLA compiles. Its output is in {self._log}; Ctrl-C ends the tuning."
            )


def _carry_out(one: Run, options: Options, directory: Path, console: Console) -> None:
    """Run its ranks on this node until all ranks of the job have made enough iterations."""
    log = directory / f"{one.name}-node{options.node_rank}.log"
    traces = directory / one.name
    first = options.node_rank * options.nproc_per_node
    for rank in range(first, first + options.nproc_per_node):  # each node removes its own, before its ranks can step
        shutil.rmtree(traces / f"rank{rank}", ignore_errors=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "npu_device.launch.on_node"],
            env=_environment(one, traces),
            stdin=subprocess.PIPE,  # its end, when this process is killed, ends the run
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal goes to this process alone, which stops the run
        )
        assert process.stdin is not None
        process.stdin.write(on_node.order(_options(one, options), {}).encode() + b"\n")
        process.stdin.flush()
        silence = _Silence(console, one.name, one.steps, log)
        try:
            while process.poll() is None and (steps := _steps(traces, options)) < one.steps:
                silence.progressed(steps)
                time.sleep(TRIAL_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
            process.stdin.close()
    # A stopped run ends with an error, and so does one whose ranks another node stopped first. Its last steps may still
    # be on their way to a shared directory.
    deadline = time.monotonic() + (TRIAL_OTHERS_SECONDS if options.nnodes > 1 else 0)
    while (steps := _steps(traces, options)) < one.steps:
        if time.monotonic() >= deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise RunError(
                f"{one.name} ended with exit code {process.returncode} after {steps} traced iterations; expected "
                f"{one.steps} on every rank.\nLikely cause: the script failed, is too short, doesn't reduce gradients, "
                f"or sets its own profiling options.\nThe end of its output ({log}):\n{tail}"
            )
        time.sleep(TRIAL_POLL_SECONDS)


def _options(one: Run, options: Options) -> Options:
    return dataclasses.replace(
        options,
        tune=False,
        job_id=f"{options.job_id or 'tune'}-{one.name}",
        preempt_timeout=options.grace or TRIAL_POLL_SECONDS,  # which must not be 0
    )


def _environment(one: Run, traces: Path) -> dict[str, str]:
    from npu_device._src.tuning import trials

    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    if one.split is not None:
        environment["NPU_DEVICE_SPLIT"] = trials.variable(one.split)
    environment["PROFILING_MODE"] = "true"
    environment["PROFILING_OPTIONS"] = json.dumps({"output": str(traces), "training_trace": "on"})
    environment["NPU_DEVICE_TRACE_ITERATIONS"] = f"1-{one.steps}"
    return environment


def _steps(traces: Path, options: Options) -> int:
    """Return how many iterations all ranks have recorded; their files begin with one line about the run."""
    counts = []
    for rank in range(options.world_size):
        try:
            counts.append((traces / f"rank{rank}" / "iterations.jsonl").read_bytes().count(b"\n") - 1)
        except FileNotFoundError:
            return 0
    return max(0, min(counts))
