"""Keeps the result of tuning: the split for ``NPU_DEVICE_SPLIT=auto``, and Ascend's fusion file."""

from __future__ import annotations

import json
from pathlib import Path

from npu_device._src import environment
from npu_device._src.gradients import saved_splits
from npu_device._src.gradients.saved_splits import SavedSplit, fingerprint, place_of
from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import Backward
from npu_device._src.tuning.traced_run import TracedRun
from npu_device._src.tuning.trials import TuningResult


def keep(result: TuningResult, work_path: Path) -> list[Path]:
    """Write the split that won the trials, which may be the present one.

    Args:
        result: of the trials.
        work_path: the tuner's directory.

    Returns:
        The files.

    Raises:
        OSError: a file can't be written.
    """
    figures = {
        "gradients": len(result.traced.step.backward.sizes),
        "seconds_before": result.tried[0].seconds,
        "seconds": result.chosen.seconds,
    }
    return _keep(result.traced, result.cost, result.chosen.plan.ends, True, figures, work_path)


def keep_prediction(found: TracedRun, cost: CostModel, ends: tuple[int, ...], work_path: Path) -> list[Path]:
    """Write a split that no run has checked, otherwise as ``keep``."""
    return _keep(found, cost, ends, False, {"gradients": len(found.step.backward.sizes)}, work_path)


def _keep(
    found: TracedRun, cost: CostModel, ends: tuple[int, ...], checked: bool, figures: dict[str, float], work_path: Path
) -> list[Path]:
    model = fingerprint(found.dtype, found.step.backward.sizes)
    split = SavedSplit(
        model=model,
        group=found.group,
        place=place_of(found.hosts, found.backend),
        ends=ends,
        checked=checked,
        found={**figures, "cost": cost.as_dict()},
    )
    return [saved_splits.save(split), _write_fusion_file(found.step.backward, model, work_path)]


def _write_fusion_file(backward: Backward, model: str, work_path: Path) -> Path:
    """Write the gradients' sizes and times in the form of Ascend's tuner, to ``TUNE_BANK_PATH`` or else the work path.

    One object per graph: the bytes of each gradient in the order of production, and the microseconds from one to the
    next; the first is the time until the first gradient. Source: Ascend's AOE guide, gradient tuning.
    """
    path = Path(environment.TUNE_BANK_PATH.get() or work_path) / "CPU_gradient_fusion.json"
    before, gaps = 0.0, []
    for ready in backward.ready:
        gaps.append(max(0, round((ready - before) * 1e6)))
        before = max(before, ready)
    value = {"gradientTime": gaps, "gradientSize": list(backward.sizes)}
    graphs = [{"modelhash": model, "modelgraphid": 1, "modelvalue": value}]
    path.write_text(json.dumps(graphs, indent=1), encoding="utf-8")
    return path
