"""The files of a report, written beside a trace: for Perfetto, as text, and as a page."""

from __future__ import annotations

import logging
from pathlib import Path

from npu_device._src.report.analysis import Analysis, analyse
from npu_device._src.report.perfetto import write_json
from npu_device._src.report.picture import page
from npu_device._src.report.summary import summary
from npu_device._src.trace.records import read

PERFETTO = "trace.json"
TEXT = "report.txt"
PAGE = "report.html"

_log = logging.getLogger("npu_device")


def write_all(directory: Path) -> Analysis:
    """Write all files into the directory of a trace, and return what they say; ValueError if there is none."""
    traces = read(directory)
    if not traces:
        raise ValueError("there is no trace in the directory")
    write_json(traces, directory / PERFETTO)
    analysis = analyse(traces)
    text = summary(analysis)
    (directory / TEXT).write_text(text + "\n", encoding="utf-8")
    (directory / PAGE).write_text(page(analysis, text), encoding="utf-8")
    return analysis


def write_report(directory: Path) -> None:
    """Run ``write_all`` at the end of a job; an error in the report does not fail the job."""
    try:
        write_all(directory)
        _log.info("the report of the trace is %s", directory / PAGE)
    except (OSError, ValueError) as error:
        _log.warning("the trace in %s has no report: %s", directory, error)
