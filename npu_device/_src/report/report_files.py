"""The files of a report, written beside a trace: for Perfetto, as text, and as a page."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from npu_device._src.report.analysis import Analysis, analyse
from npu_device._src.report.perfetto import write_json
from npu_device._src.report.picture import page
from npu_device._src.report.summary import summary
from npu_device._src.trace.records import read

PERFETTO = "trace.json"
TEXT = "report.txt"
PAGE = "report.html"

# How these files begin. The directory may be the working directory, and a file of such a name the user's.
_BEGINNINGS = {
    PERFETTO: rb'{"traceEvents": \[{[^}]*"rank \d+ \(',
    TEXT: rb"\d+ gradients, .* ranks on \d+ hosts?, group ",
    PAGE: rb"<!DOCTYPE html>\s.*<title>Iteration trace</title>",
}
_BEGINNING_BYTES = 1000
_FOLDER = "npu_report"

_log = logging.getLogger("npu_device")


def report_folder(directory: Path) -> Path:
    """Return where the report on a trace is: in its directory, or in a folder in it if the user has such files."""
    for name, beginning in _BEGINNINGS.items():
        path = directory / name
        if path.exists():
            with path.open("rb") as file:
                if not re.match(beginning, file.read(_BEGINNING_BYTES)):
                    return directory / _FOLDER
    return directory


def write_all(directory: Path) -> Analysis:
    """Write all files on the trace in a directory, and return what they say; ValueError if there is none."""
    traces = read(directory)
    if not traces:
        raise ValueError("there is no trace in the directory")
    folder = report_folder(directory)
    folder.mkdir(exist_ok=True)
    write_json(traces, folder / PERFETTO)
    analysis = analyse(traces)
    text = summary(analysis)
    (folder / TEXT).write_text(text + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(analysis, text), encoding="utf-8")
    return analysis


def write_report(directory: Path) -> None:
    """Run ``write_all`` at the end of a job; an error in the report does not fail the job."""
    try:
        write_all(directory)
        folder = report_folder(directory)
        if folder != directory:
            _log.warning(
                "the report of the trace is in %s: the directory has files of its names", folder
            )
        _log.info("the report of the trace is %s", folder / PAGE)
    except Exception as error:
        # The job has ended well: nothing in a report may fail it.
        _log.warning("the trace in %s has no report: %s", directory, error)
