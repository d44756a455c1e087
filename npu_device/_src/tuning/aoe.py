"""``aoe_mode`` "4" in a script: one run that traces and measures, and names the most promising split at its end.

A single run can't try splits, so its result is a prediction; ``npurun --tune`` checks splits.

Source: Ascend's AOE guide, gradient tuning.
"""

from __future__ import annotations

import atexit
import logging
from pathlib import Path

from npu_device._src.collectives.group import WORLD_GROUP, group_of
from npu_device._src.collectives.job import Job
from npu_device._src.trace.records import read
from npu_device._src.trace.settings import Settings
from npu_device._src.tuning import messages
from npu_device._src.tuning.cost_model import MEASURED_FILE, CostModel
from npu_device._src.tuning.keeping import keep_prediction
from npu_device._src.tuning.measure import measure
from npu_device._src.tuning.planner import best_plan, predict
from npu_device._src.tuning.traced_run import summarise
from npu_device._src.tuning.trials import FIRST, WARM_UP

_DIRECTORY = "npu_tune"
# The gradients aren't known when the collectives are measured.
_LARGEST = 32_000_000

_log = logging.getLogger("npu_device")


def begin(job: Job, work_path: Path, largest: int = _LARGEST) -> Settings:
    """Measure the collectives, and have rank 0 plan when the script ends.

    Args:
        job: the job. Every rank calls this.
        work_path: directory for the tuner's files, ``aoe_config.work_path``.
        largest: bytes of the largest collective that is measured.

    Returns:
        The settings of the trace.

    Raises:
        OSError: the work path can't be written.
    """
    directory = (work_path / _DIRECTORY).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    cost = measure(job, group_of(job, WORLD_GROUP), largest)
    if job.cluster.rank == 0:
        cost.write(directory / MEASURED_FILE)
        atexit.register(finish, directory, cost)
    return Settings(output=directory / FIRST)


def finish(directory: Path, cost: CostModel) -> None:
    """Plan, keep the split and log it; an unusable trace is logged as well.

    Args:
        directory: with the trace in it.
        cost: the measured collectives.
    """
    try:
        found = summarise(read(directory / FIRST), WARM_UP)
        backward = found.without_collectives(cost).backward
        best = best_plan(backward, cost)
        # A split that may be slower, given the uncertainty of the figures, is not used without a trial.
        present = predict(backward, cost, found.ends)
        better = predict(backward, cost.slower(), best.ends).finish < present.finish
        ends = best.ends if better else found.ends
        files = keep_prediction(found, cost, ends, directory)
    except (OSError, ValueError) as error:
        _log.warning("aoe_mode 4: no split was found: %s", error)
        return
    _log.warning(
        "aoe_mode 4:\n%s\n\nThe most promising split. No run has checked it (npurun --tune does):\n  %s\nwritten to %s",
        messages.prediction(found, cost),
        messages.line_to_paste(ends, found.group),
        " and ".join(map(str, files)),
    )
