"""Writes the files made from a recorded trace: table, Perfetto's file, the report as text and as a page."""

from __future__ import annotations

import logging
from pathlib import Path

from npu_device._src.report.analysis import analyse
from npu_device._src.report.chrome import write_json
from npu_device._src.report.step_trace import write_csv
from npu_device._src.report.summary import summary
from npu_device._src.report.trace_page import page
from npu_device._src.trace.records import read

TABLE, PERFETTO, TEXT, PAGE = "step_trace.csv", "trace.json", "report.txt", "report.html"

_log = logging.getLogger("npu_device")


def write_all(directory: Path) -> str:
    """Write all files into the trace's directory.

    Returns:
        The report's text.

    Raises:
        ValueError: there is no trace, or nothing that can be read as one.
        OSError: the directory can't be written.
    """
    traces = read(directory)
    if not traces:
        raise ValueError("there is no trace in the directory")
    write_csv(traces, directory / TABLE)
    write_json(traces, directory / PERFETTO)
    found = analyse(traces)
    text = summary(found)
    (directory / TEXT).write_text(text + "\n", encoding="utf-8")
    (directory / PAGE).write_text(page(found), encoding="utf-8")
    return text


def write_report(directory: Path) -> None:
    """Run ``write_all`` at the end of a job; an error in the report does not fail the job."""
    try:
        write_all(directory)
        _log.info("the trace's report is %s", directory / PAGE)
    except (OSError, ValueError) as error:
        _log.warning("the trace in %s has no report: %s", directory, error)
