"""Tells npurun which checkpoint is the newest."""

from __future__ import annotations

import logging

from npu_device._src import environment
from npu_device._src.whole_files import write_whole

_log = logging.getLogger("npu_device")


def note_progress(rank: int, step: int) -> None:
    """Let rank 0 write the step of a complete checkpoint to the file that npurun reads, if it has named one."""
    progress = environment.NPU_DEVICE_PROGRESS_FILE.get()
    if progress is None or rank != 0:
        return
    try:
        write_whole(progress, f"{step}\n".encode())
    except OSError as error:
        _log.warning("npurun can't be told of the checkpoint of step %d: %s", step, error)
