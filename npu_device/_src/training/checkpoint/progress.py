"""Tells npurun which checkpoint is the newest."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from npu_device._src import environment

_log = logging.getLogger("npu_device")


def note_progress(step: int) -> None:
    """Write the step of a complete checkpoint to the file that npurun reads, if it has named one."""
    progress = environment.NPU_DEVICE_PROGRESS_FILE.get()
    if progress is None:
        return
    try:
        # Written beside and renamed: npurun may read at any moment.
        Path(f"{progress}.part").write_text(f"{step}\n", encoding="utf-8")
        os.replace(f"{progress}.part", progress)
    except OSError as error:
        _log.warning("npurun can't be told of the checkpoint of step %d: %s", step, error)
