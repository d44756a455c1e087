"""The pytest plugin in the process of the test: sends a test to the ranks, and makes one report of theirs."""

from __future__ import annotations

import os
import pickle
import re
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from npu_device._src.cluster.time_limits import COLLECTING_SECONDS
from npu_device._src.testing import pytest_rank, run
from npu_device._src.testing.answers import RankError
from npu_device._src.testing.marked_tests import size_of
from npu_device._src.testing.pool import Pool

_NOT_SHARED: dict[str, Any] = {
    **{
        "collectonly": False,
        "keyword": "",
        "markexpr": "",
        "deselect": None,
        "maxfail": 0,
        "npu_ranks": None,
    },
    **{"lf": False, "failedfirst": False, "newfirst": False, "stepwise": False},
    **{
        "usepdb": False,
        "trace": False,
        "dist": "no",
        "tx": [],
        "numprocesses": None,
        "looponfail": False,
    },
}
"""Options that the ranks' sessions have otherwise: which tests to select, and who runs them."""


class _Sessions(Pool):
    """Ranks with a pytest session each, in which they have collected the files with tests for ranks."""

    has_begun = False

    def begin(self, session: pytest.Session) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        config = session.config
        self.shown: dict[int, int] = {}  # how much of each rank's output has been printed
        given: Mapping[str, Any] = getattr(config, "workerinput", {})
        files = {str(item.path): None for item in session.items if size_of(item) is not None}
        options = {
            **vars(config.option),
            **_NOT_SHARED,
            "basetemp": str(_temporary(config, f"{self.size}ranks")),
        }
        options.update(
            rootdir=str(config.rootpath),
            inifilename=str(config.inipath) if config.inipath else None,
        )
        worker_input = {
            "workerid": given.get("workerid", ""),
            "cov_master_host": socket.gethostname(),  # pytest-cov's: the ranks save beside this process
            "cov_master_topdir": os.getcwd(),
            "cov_master_rsync_roots": [],
            **{
                name: value
                for name, value in given.items()
                if name.startswith("cov_") or name == "testrunuid"
            },
        }
        sent = {name: value for name, value in options.items() if _can_be_sent(value)}
        arguments = (str(config.invocation_params.dir), sent, list(files), worker_input)
        try:
            self.run(pytest_rank.session, *arguments, timeout=COLLECTING_SECONDS)
        except RankError:
            self.close()
            raise


def _can_be_sent(value: Any) -> bool:
    try:
        return bool(pickle.dumps(value))
    except Exception:
        return False


def _temporary(config: pytest.Config, name: str) -> Any:
    return config._tmp_path_factory.mktemp(name)  # type: ignore[attr-defined]


_not_started: Exception | None = None


def start(item: pytest.Item) -> None:
    """Start the ranks of a test, unless they wait for it; an error is one of the test."""
    global _not_started
    try:
        _not_started = None
        run.pool_of(_kind(item), _Sessions).begin(item.session)
    except Exception as error:
        _not_started = error


def run_test(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test on its ranks, as ``pytest_runtest_protocol`` does."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _kind(item: pytest.Item) -> Any:
    mark = item.get_closest_marker("ranks")
    size = size_of(item)
    if mark is None or size is None:
        return None
    kind = run.kind_of(size, mark.kwargs.get("keras"), mark.kwargs.get("environment") or {})
    return (*kind, "pytest")  # these ranks aren't those of ``run``


def _reports(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
    try:
        answers = _answers(item, nextitem)
    except (
        pytest.fail.Exception,
        Exception,
    ) as error:  # pytest-timeout's, or the ranks did not start
        stacks = [
            f"rank {rank} was here:\n{stack}"
            for rank, stack in getattr(error, "stacks", {}).items()
        ]
        yield _report(item, "call", "failed", "\n".join([str(error), *stacks]))
        return
    by_rank: dict[int, dict[str, pytest.TestReport]] = {}
    for rank, answer in answers.items():
        if isinstance(answer.value, str):  # the rank is gone, or hangs
            by_rank[rank] = {"call": _report(item, "call", "failed", answer.value)}
            continue
        data, recorded = answer.value
        reports = [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=each)
            for each in data
        ]
        by_rank[rank] = {report.when: report for report in reports}
        if rank == 0:
            _warn(item.config, recorded)
    for when in ("setup", "call", "teardown"):
        found = {rank: reports[when] for rank, reports in by_rank.items() if when in reports}
        if found:
            yield _merged(item, found)


def _answers(item: pytest.Item, nextitem: pytest.Item | None) -> dict[int, Any]:
    kind = _kind(item)
    following = next((one for one in _after(item, nextitem) if _kind(one) == kind), None)
    limit = float(item.get_closest_marker("ranks").kwargs.get("limit", 300))  # type: ignore[union-attr]
    if _not_started is not None:
        raise _not_started
    pool = run.pool_of(kind, _Sessions)
    directory = _temporary(item.config, re.sub(r"\W", "_", item.name)[:30])
    arguments = (
        pytest_rank.name_of(item),
        following and pytest_rank.name_of(following),
        str(directory),
    )
    try:
        return pool.ask(pytest_rank.test, arguments, limit)
    finally:
        if item.config.option.capture == "no":
            _show(pool)


def _after(item: pytest.Item, nextitem: pytest.Item | None) -> Sequence[pytest.Item]:
    return item.session.items[item.session.items.index(nextitem) :] if nextitem is not None else ()


def _show(pool: _Sessions) -> None:
    """Print what the ranks have printed since the last test, for ``-s``."""
    for rank, process in enumerate(pool.processes):
        shown, output = pool.shown.get(rank, 0), process.output
        pool.shown[rank] = len(output)
        for line in output[shown:].splitlines():
            print(f"[{rank}] {line}")


def _merged(item: pytest.Item, reports: dict[int, pytest.TestReport]) -> pytest.TestReport:
    """Return one report: the first that failed, with what the others failed with; ranks that skip alone fail."""
    failed = [rank for rank, report in reports.items() if report.failed]
    skipped = [
        rank
        for rank, report in reports.items()
        if report.skipped and not hasattr(report, "wasxfail")
    ]
    chosen = reports[min(reports)]
    if failed:
        chosen = reports[failed[0]]
        others = {rank: reports[rank].longreprtext for rank in failed[1:]}
        own: Any = chosen.longrepr
        if others and hasattr(own, "addsection"):
            for rank, text in others.items():
                own.addsection(f"rank {rank}", text, "_")
        elif others:
            chosen.longrepr = "\n\n".join(
                [str(own), *(f"rank {rank}:\n{text}" for rank, text in others.items())]
            )
        then = f", then on rank(s) {', '.join(map(str, others))}" if others else ""
        chosen.sections.insert(
            0, ("Ranks", f"failed first on rank {failed[0]} of {size_of(item)}{then}")
        )
    elif skipped and len(skipped) < len(reports):
        ran = sorted(set(reports).difference(skipped))
        skip: Any = reports[skipped[0]].longrepr
        text = f"rank(s) {skipped} skipped the test ({skip[2]}), and rank(s) {ran} ran it"
        return _report(
            item, str(chosen.when), "failed", f"{text}.\nWhat to do: skip on all ranks, or on none."
        )
    elif any(hasattr(report, "wasxfail") and report.skipped for report in reports.values()):
        chosen = next(
            report for report in reports.values() if hasattr(report, "wasxfail") and report.skipped
        )
    for rank, report in reports.items():
        if report is not chosen:
            chosen.sections += [(f"{name}, rank {rank}", text) for name, text in report.sections]
    chosen.nodeid = item.nodeid
    chosen.duration = max(report.duration for report in reports.values())
    return chosen


def _report(item: pytest.Item, when: Any, outcome: Any, text: str) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, text, when, start=0, stop=0
    )


def _warn(config: pytest.Config, recorded: Sequence[Any]) -> None:
    for text, category, file, line, when, nodeid, location in recorded:
        kind = type(category, (UserWarning,), {})
        message = warnings.WarningMessage(kind(text), kind, file, line)
        arguments = {
            "warning_message": message,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        config.hook.pytest_warning_recorded.call_historic(kwargs=arguments)


def close() -> None:
    run.close_pools(_Sessions)
