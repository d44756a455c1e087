"""``aoe_mode`` "4" in a script: one run that traces and measures, and says at its end which split to expect most of.

A single run can't try splits, so that what it finds is a prediction; ``npurun --tune`` checks.

Source: Ascend's AOE guide, gradient tuning.
"""

from __future__ import annotations

import atexit
import logging
from pathlib import Path

from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import WORLD_GROUP, group_of
from npu_device.profiling.records import read
from npu_device.profiling.settings import Settings
from npu_device.tuning import report
from npu_device.tuning.cost_model import MEASURED_FILE, CostModel
from npu_device.tuning.keeping import keep_prediction
from npu_device.tuning.measure import measure
from npu_device.tuning.planner import best_plan, predict
from npu_device.tuning.traced import traced
from npu_device.tuning.trials import FIRST, WARM_UP

_DIRECTORY = "npu_tune"
# The gradients aren't known when the collectives are measured.
_LARGEST = 32_000_000

_log = logging.getLogger("npu_device")


def begin(runtime: Runtime, work_path: Path) -> Settings:
    """Measure the collectives, and see to it that rank 0 plans when the script ends.

    Args:
        runtime: the running cluster. Every rank calls this.
        work_path: directory for the tuner's files, ``aoe_config.work_path``.

    Returns:
        What is to be traced.

    Raises:
        OSError: the work path can't be written.
    """
    directory = (work_path / _DIRECTORY).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    cost = measure(runtime, group_of(runtime, WORLD_GROUP), _LARGEST)
    if runtime.cluster.rank == 0:
        cost.write(directory / MEASURED_FILE)
        atexit.register(finish, directory, cost)
    return Settings(output=directory / FIRST)


def finish(directory: Path, cost: CostModel) -> None:
    """Plan, keep the split and log it; a trace of no use is logged as well.

    Args:
        directory: with the trace in it.
        cost: the measured collectives.
    """
    try:
        found = traced(read(directory / FIRST), WARM_UP)
        backward = found.without_collectives(cost).backward
        best = best_plan(backward, cost)
        # What may be slower within the uncertainty of the figures is not taken without a trial.
        present = predict(backward, cost, found.ends)
        better = predict(backward, cost.slower(), best.ends).finish < present.finish
        ends = best.ends if better else found.ends
        files = keep_prediction(found, cost, ends, directory)
    except (OSError, ValueError) as error:
        _log.warning("aoe_mode 4: no split was found: %s", error)
        return
    _log.warning(
        "aoe_mode 4:\n%s\n\nThe split to expect most of, which no run has checked (npurun --tune does):\n  %s\nwritten "
        "to %s",
        report.prediction(found, cost),
        report.line_to_paste(ends, found.group),
        " and ".join(map(str, files)),
    )
