"""``npurun --tune``: runs the script several times, for a few steps each, and lets the tuner compare.

Every run is a separate npurun, stopped when its trace has enough iterations. ``tuning`` decides what is tried and what
wins; ``tune_nodes`` keeps several nodes in step.
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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from npu_device.launch import on_node
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import FAILED
from npu_device.launch.console import Console
from npu_device.launch.tune_nodes import TuningFollower, TuningLeader, TuningRun

if TYPE_CHECKING:
    from npu_device._src.tuning.trials import Budget

DIRECTORY = "npu_tune"
"""The directory for everything, in the working directory; several nodes must share it."""

_POLL_SECONDS = 0.1
_SILENT_SECONDS = 60.0  # the user is told after this long without a step, then after twice as long each time
_OTHERS_SECONDS = 5.0  # the ranks of other nodes may end this much later than those of this one
_TAIL_LINES = 20
# Variables that would interfere: another way to ask for tuning, and the split to be found.
_OURS = ("AOE_MODE", "NPU_DEVICE_SPLIT")


class RunError(RuntimeError):
    """A run ended before it had made enough steps; the text includes the end of its output."""


def run(options: Options, budget: Budget | None = None) -> int:
    """Tune the script on this node, as the leader on node 0 and as a follower on the others.

    Args:
        options: the command line.
        budget: limits on the runs; default the tuner's.

    Returns:
        0, or 1 if a run failed; a signal's number + 128 if one stopped the tuning.
    """
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory = Path(DIRECTORY).resolve()
    directory.mkdir(exist_ok=True)
    try:
        if options.world_size == 1:
            raise ValueError("a single rank reduces nothing. What to do: npurun -n 2 --tune …")
        if options.node_rank == 0:
            print(_lead(options, budget, directory, console))
        else:
            follower = TuningFollower(directory, options.node_rank, options.master_addr)
            for tuning_run in follower:
                _carry_out(tuning_run, options, directory, console, follower.check)
    except (RunError, ValueError, OSError) as error:
        console.say(f"tuning failed: {error}")
        return FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _lead(options: Options, budget: Budget | None, directory: Path, console: Console) -> str:
    """Tune, and return the message for the user."""
    # Imported here: npurun without --tune doesn't need numpy.
    from npu_device._src.trace.records import read
    from npu_device._src.tuning import messages
    from npu_device._src.tuning.cost_model import MEASURED_FILE, CostModel
    from npu_device._src.tuning.keeping import keep
    from npu_device._src.tuning.traced_run import TracedRun, summarise
    from npu_device._src.tuning.trials import FIRST, WARM_UP, Budget, tune

    for old in (*directory.glob("run*"), *directory.glob(f"{FIRST}*"), directory / MEASURED_FILE):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    console.say(f"tuning: traces and output of all runs go to {directory}")
    with TuningLeader(directory, options.nnodes, options.master_addr) as leader:

        def run_everywhere(tuning_run: TuningRun) -> None:
            leader.announce(tuning_run)
            _carry_out(tuning_run, options, directory, console, leader.check)

        def script(name: str, ends: Sequence[int] | None, steps: int) -> TracedRun:
            run_everywhere(TuningRun(name, None, list(ends) if ends else None, WARM_UP + steps))
            return summarise(read(directory / name), WARM_UP)

        def measure(largest: int) -> CostModel:
            run_everywhere(TuningRun("collectives", [str(directory / MEASURED_FILE), str(largest)], None, 0))
            return CostModel.read(directory / MEASURED_FILE)

        result = tune(script, measure, console.say, budget or Budget())
    kept = keep(result, directory)
    unchanged = f"leave the script unchanged and start it with NPU_DEVICE_SPLIT=auto, which reads {kept[0]}"
    advice = f"Or {unchanged}" if result.gained else "Keep the present split: nothing has to be changed."
    return f"{messages.prediction(result.traced, result.cost)}\n\n{messages.outcome(result)}\n\n{advice}"


class _Silence:
    """Tells the user that a run continues without making steps; otherwise a run that never will would go unnoticed."""

    def __init__(self, console: Console, tuning_run: TuningRun, log: Path) -> None:
        self._console, self._tuning_run, self._log = console, tuning_run, log
        self._steps = 0
        self._since = time.monotonic()
        self._patience = _SILENT_SECONDS

    def progressed(self, steps: int) -> None:
        """Record how many steps the run has made."""
        silent = time.monotonic() - self._since
        if steps > self._steps:
            self._steps, self._since, self._patience = steps, time.monotonic(), _SILENT_SECONDS
        elif silent > self._patience:
            self._patience *= 2
            what = f"{self._tuning_run.name}: nothing for {silent:.0f} s"
            if self._tuning_run.measuring is None:
                what += (
                    f", {self._steps} of {self._tuning_run.iterations} steps traced so far. Either a step takes that "
                    "long, or the script doesn't reduce gradients, or does so in a step that XLA compiles"
                )
            self._console.say(f"{what}. Its output is in {self._log}; Ctrl-C ends the tuning.")


def _carry_out(
    tuning_run: TuningRun, options: Options, directory: Path, console: Console, check: Callable[[], None]
) -> None:
    """Run its ranks on this node until it has ended, or has made enough iterations.

    Args:
        tuning_run: what to run.
        options: the command line.
        directory: the directory of the tuning.
        console: where progress is reported.
        check: raises OSError if another node is gone.

    Raises:
        RunError: it ended with an error, or too early.
        OSError: another node is gone.
    """
    log = directory / f"{tuning_run.name}.log"
    traces = directory / tuning_run.name
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "npu_device.launch.on_node"],
            env=_environment(tuning_run, traces),
            stdin=subprocess.PIPE,  # its end, when this process is killed, ends the run
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal goes to this process alone, which stops the run
        )
        assert process.stdin is not None
        process.stdin.write(on_node.order(_options(tuning_run, options), {}).encode() + b"\n")
        process.stdin.flush()
        silence = _Silence(console, tuning_run, log)
        try:
            while process.poll() is None and not _is_enough(tuning_run, traces, options.world_size):
                check()
                silence.progressed(min(_iterations(traces, rank) for rank in range(options.world_size)))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
            process.stdin.close()
    # A stopped run ends with an error, and so does one whose ranks another node stopped first.
    done = process.returncode == 0 if tuning_run.measuring is not None else _has_enough(tuning_run, traces, options)
    if not done:
        check()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        counts = ", ".join(str(_iterations(traces, rank)) for rank in range(options.world_size))
        what = f"{tuning_run.name} ended with exit code {process.returncode}"
        if tuning_run.measuring is None:
            what += f" after {counts} traced iterations (by rank); expected {tuning_run.iterations} on every rank"
        raise RunError(
            f"{what}.\nLikely cause: the script failed, is too short, doesn't reduce gradients, or sets its own "
            f"profiling options.\nThe end of its output ({log}):\n{tail}"
        )


def _has_enough(tuning_run: TuningRun, traces: Path, options: Options) -> bool:
    """Return whether a run that has ended here made enough iterations. On several nodes, wait for what the ranks of the
    others write last.
    """
    deadline = time.monotonic() + (_OTHERS_SECONDS if options.nnodes > 1 else 0)
    while not (enough := _is_enough(tuning_run, traces, options.world_size)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return enough


def _options(tuning_run: TuningRun, options: Options) -> Options:
    command = options.command
    if tuning_run.measuring is not None:
        command = (sys.executable, "-u", "-m", "npu_device.launch.measuring", *tuning_run.measuring)
    return dataclasses.replace(
        options,
        tune=False,
        command=command,
        job_id=f"{options.job_id or 'tune'}-{tuning_run.key}",
        preempt_timeout=options.grace or _POLL_SECONDS,  # which must not be 0
    )


def _environment(tuning_run: TuningRun, traces: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    if tuning_run.ends is not None:
        environment["NPU_DEVICE_SPLIT"] = ",".join(map(str, tuning_run.ends))
    if tuning_run.measuring is None:
        environment["PROFILING_MODE"] = "true"
        environment["PROFILING_OPTIONS"] = json.dumps({"output": str(traces), "training_trace": "on"})
        environment["NPU_DEVICE_TRACE_ITERATIONS"] = f"1-{tuning_run.iterations}"
    return environment


def _is_enough(tuning_run: TuningRun, traces: Path, world_size: int) -> bool:
    return tuning_run.measuring is None and all(
        _iterations(traces, rank) >= tuning_run.iterations for rank in range(world_size)
    )


def _iterations(traces: Path, rank: int) -> int:
    """Return how many iterations a rank has recorded; its file begins with one line about the run."""
    try:
        with (traces / f"rank{rank}" / "iterations.jsonl").open("rb") as file:
            return max(0, file.read().count(b"\n") - 1)
    except FileNotFoundError:
        return 0
