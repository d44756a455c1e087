"""``HOROVOD_TIMELINE``: the file that Horovod would write is a copy of the trace's."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
from pathlib import Path

from npu_device._src import environment
from npu_device._src.report.report_files import PERFETTO


def ask_for_timeline() -> None:
    """Ask for a trace, if the variable is set, and for the copy at exit. Call it before the device is opened."""
    file = environment.HOROVOD_TIMELINE.get()
    # A trace that the user has asked for otherwise stays as it is.
    if file is not None and environment.PROFILING_MODE.get() != "true":
        environment.PROFILING_MODE.set("true")
        folder = Path(f"{file}.trace").resolve()
        # The path is absolute, since the script may change its folder before the end.
        environment.PROFILING_OPTIONS.set(json.dumps({"output": str(folder)}))
        # The copy runs after the trace's own end, which is registered later.
        atexit.register(_copy, folder / PERFETTO, Path(file).resolve())


def _copy(written: Path, file: Path) -> None:
    # There is no file on other ranks than 0, or if nothing was traced.
    with contextlib.suppress(OSError):
        shutil.copyfile(written, file)
