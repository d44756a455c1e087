"""``<device>_gradient_fusion.json``: the gradients' sizes and times in the form of Ascend's tuner.

Source: Ascend's AOE guide, gradient tuning. One object per graph: the bytes of each gradient in the order of
production, and the microseconds from one to the next; the first is the time until the first gradient.
"""

from __future__ import annotations

import json
from pathlib import Path

from npu_device._src import environment
from npu_device._src.tuning.planner import Backward


def write(backward: Backward, model: str, work_path: Path, device: str = "CPU") -> Path:
    """Write the file to ``TUNE_BANK_PATH``, else to the work path.

    Args:
        backward: the gradients.
        model: fingerprint of the gradients.
        work_path: the tuner's directory, which exists.
        device: first part of the file's name.

    Returns:
        The file; one of an earlier run is replaced.

    Raises:
        OSError: it can't be written.
    """
    path = Path(environment.TUNE_BANK_PATH.get() or work_path) / f"{device}_gradient_fusion.json"
    before, gaps = 0.0, []
    for ready in backward.ready:
        gaps.append(max(0, round((ready - before) * 1e6)))
        before = max(before, ready)
    value = {"gradientTime": gaps, "gradientSize": list(backward.sizes)}
    graphs = [{"modelhash": model, "modelgraphid": 1, "modelvalue": value}]
    path.write_text(json.dumps(graphs, indent=1), encoding="utf-8")
    return path
