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
from npu_device._src.pools.answers import RankError
from npu_device._src.pools.pool import Pool
from npu_device._src.testing import pytest_rank, run
from npu_device._src.testing.marked_tests import size_of

# All tests are collected, and the process of the test selects. Ranks have no terminal, and so no debugger.
_SWITCHED_OFF = "collectonly lf failedfirst newfirst stepwise usepdb trace looponfail"
_OPTIONS_OF_RANKS: dict[str, Any] = {
    **dict.fromkeys(_SWITCHED_OFF.split(), False),
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("deselect", "npu_ranks", "numprocesses")),
    "maxfail": 0,
    "dist": "no",
    "tx": [],
}
"""The options in which the sessions of the ranks differ."""


_PHASES = ("setup", "call", "teardown")


class _Sessions(Pool):
    """Ranks with a pytest session each, in which they have collected the files with tests for ranks."""

    has_begun = False

    def begin(self, session: pytest.Session) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        config = session.config
        self.printed: dict[int, int] = {}  # how much of each rank's output has been printed
        items = [item for item in session.items if size_of(item) is not None]
        files = dict.fromkeys(str(item.path) for item in items)
        options = {
            **vars(config.option),
            **_OPTIONS_OF_RANKS,
            "basetemp": str(_temporary(config, f"{self.size}ranks")),
            "rootdir": str(config.rootpath),
            "inifilename": None,
        }
        if config.inipath:
            options["inifilename"] = str(config.inipath)
        # Options of other plugins may be objects that belong to this process.
        picklable = {name: option for name, option in options.items() if _is_picklable(option)}
        try:
            self.run(
                pytest_rank.session,
                str(config.invocation_params.dir),
                picklable,
                list(files),
                _worker_input(config),
                timeout=COLLECTING_SECONDS,
            )
        except RankError:
            self.close()
            raise


def _worker_input(config: pytest.Config) -> dict[str, Any]:
    """Return what other plugins want to know of the process that has started a worker."""
    # pytest-xdist gives its workers this attribute.
    own_input: Mapping[str, Any] = getattr(config, "workerinput", {})
    worker_input = {
        "workerid": own_input.get("workerid", ""),
        # pytest-cov has the ranks save beside this process.
        "cov_master_host": socket.gethostname(),
        "cov_master_topdir": os.getcwd(),
        "cov_master_rsync_roots": [],
    }
    # The rank's coverage is then added to the coverage of this process.
    for name in own_input:
        if name.startswith("cov_") or name == "testrunuid":
            worker_input[name] = own_input[name]
    return worker_input


def _is_picklable(option: Any) -> bool:
    try:
        return bool(pickle.dumps(option))
    except Exception:
        return False


def _temporary(config: pytest.Config, name: str) -> Any:
    return config._tmp_path_factory.mktemp(name)  # type: ignore[attr-defined]


_start_error: Exception | None = None


def start(item: pytest.Item) -> None:
    """Start the ranks of a test, unless they wait for it; an error is one of the test."""
    global _start_error
    try:
        _start_error = None
        run.pool_of(_pool_key(item), _Sessions).begin(item.session)
    except Exception as error:
        _start_error = error


def run_test(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test on its ranks, as ``pytest_runtest_protocol`` does."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    _tear_down(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _tear_down(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures of this process that the next test doesn't need, and report their errors, as pytest does."""
    session = item.session
    # After the last test of a run, all fixtures end.
    if session.shouldfail or session.shouldstop:
        nextitem = None
    call = pytest.CallInfo.from_call(
        lambda: session._setupstate.teardown_exact(nextitem),
        "teardown",
        reraise=(pytest.exit.Exception, KeyboardInterrupt),
    )
    if call.excinfo is not None:
        # Not by the hook: pytest-rerunfailures expects that it has begun the test itself.
        report = pytest.TestReport.from_item_and_call(item, call)
        item.ihook.pytest_runtest_logreport(report=report)


def _pool_key(item: pytest.Item) -> Any:
    """Return what tells the pool of a test apart; None for a test without ranks."""
    mark = item.get_closest_marker("ranks")
    size = size_of(item)
    if mark is None or size is None:
        return None
    options = mark.kwargs
    key = run.pool_key(size, options.get("keras"), options.get("environment") or {})
    # These tests have ranks of their own, apart from the ranks of ``run``.
    return (*key, "pytest")


def _reports(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
    try:
        answers = _answers(item, nextitem)
    # The former is no ``Exception``.
    except (pytest.fail.Exception, Exception) as error:
        # ``pytest.fail.Exception`` comes from pytest-timeout; any other error means that the ranks didn't start.
        texts = [str(error)]
        for rank, stack in getattr(error, "stacks", {}).items():
            texts.append(f"rank {rank} was here:\n{stack}")
        yield _report(item, "call", "failed", "\n".join(texts))
        return
    by_phase: dict[str, dict[int, pytest.TestReport]] = {phase: {} for phase in _PHASES}
    for rank, answer in answers.items():
        if isinstance(answer.value, str):
            # The rank is gone, or hangs.
            by_phase["call"][rank] = _report(item, "call", "failed", answer.value)
            continue
        packed_reports, packed_warnings = answer.value
        for packed_report in packed_reports:
            report = item.config.hook.pytest_report_from_serializable(
                config=item.config, data=packed_report
            )
            by_phase[report.when][rank] = report
        if rank == 0:
            _report_warnings(item.config, packed_warnings)
    for reports in filter(None, by_phase.values()):
        yield _merged(item, reports)


def _answers(item: pytest.Item, nextitem: pytest.Item | None) -> dict[int, Any]:
    if _start_error is not None:
        raise _start_error
    pool_key = _pool_key(item)
    # The ranks keep the fixtures that their next test needs, too.
    successor = None
    for later_item in _after(item, nextitem):
        if _pool_key(later_item) == pool_key:
            successor = pytest_rank.name_of(later_item)
            break
    limit = float(item.get_closest_marker("ranks").kwargs.get("limit", 300))  # type: ignore[union-attr]
    pool = run.pool_of(pool_key, _Sessions)
    name = re.sub(r"\W", "_", item.name)
    directory = _temporary(item.config, name[:30])
    arguments = (pytest_rank.name_of(item), successor, str(directory))
    try:
        return pool.ask(pytest_rank.test, arguments, limit)
    finally:
        if item.config.option.capture == "no":
            _print_output(pool)


def _after(item: pytest.Item, nextitem: pytest.Item | None) -> Sequence[pytest.Item]:
    if nextitem is None:
        return ()
    items = item.session.items
    return items[items.index(nextitem) :]


def _print_output(pool: _Sessions) -> None:
    """Print what the ranks have printed since the last test, for ``-s``."""
    for rank, process in enumerate(pool.processes):
        output = process.output
        start_of_test = pool.printed.get(rank, 0)
        pool.printed[rank] = len(output)
        for line in output[start_of_test:].splitlines():
            print(f"[{rank}] {line}")


def _merged(item: pytest.Item, reports: dict[int, pytest.TestReport]) -> pytest.TestReport:
    """Return one report: the first that failed, with what the others failed with; ranks that skip alone fail."""
    failed = [rank for rank, report in reports.items() if report.failed]
    skipped = []
    for rank, report in reports.items():
        if report.skipped and not hasattr(report, "wasxfail"):
            skipped.append(rank)
    if not failed and skipped and len(skipped) < len(reports):
        ran = sorted(set(reports).difference(skipped))
        skip: Any = reports[skipped[0]].longrepr
        text = f"rank(s) {skipped} skipped the test ({skip[2]}), and rank(s) {ran} ran it"
        when = str(reports[skipped[0]].when)
        return _report(item, when, "failed", f"{text}.\nWhat to do: skip on all ranks, or on none.")
    merged = reports[min(reports)]
    if failed:
        merged = reports[failed[0]]
        _add_failures(merged, {rank: reports[rank].longreprtext for rank in failed[1:]})
        merged.sections.insert(0, ("Ranks", _order_of_failures(failed, size_of(item))))
    else:
        for report in reports.values():
            if report.skipped and hasattr(report, "wasxfail"):
                merged = report
                break
    for rank, report in reports.items():
        if report is not merged:
            merged.sections += [(f"{name}, rank {rank}", text) for name, text in report.sections]
    merged.nodeid = item.nodeid
    # The ranks run at the same time.
    merged.duration = max(report.duration for report in reports.values())
    return merged


def _add_failures(report: pytest.TestReport, later_texts: Mapping[int, str]) -> None:
    """Add to the report of the first failure the texts of the later ones, by rank."""
    description: Any = report.longrepr
    if hasattr(description, "addsection"):
        for rank, text in later_texts.items():
            description.addsection(f"rank {rank}", text, "_")
    elif later_texts:
        texts = [f"rank {rank}:\n{text}" for rank, text in later_texts.items()]
        report.longrepr = "\n\n".join([str(description), *texts])


def _order_of_failures(failed: Sequence[int], size: int | None) -> str:
    order = f"failed first on rank {failed[0]} of {size}"
    if len(failed) > 1:
        order += f", then on rank(s) {', '.join(map(str, failed[1:]))}"
    return order


def _report(item: pytest.Item, when: Any, outcome: Any, text: str) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, text, when, start=0, stop=0
    )


def _report_warnings(config: pytest.Config, packed_warnings: Sequence) -> None:
    for text, category, file, line, when, nodeid, location in packed_warnings:
        # The class of the warning may not exist in this process, but its name counts.
        warning = type(category, (UserWarning,), {})
        message = warnings.WarningMessage(warning(text), warning, file, line)
        arguments = {
            "warning_message": message,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        config.hook.pytest_warning_recorded.call_historic(kwargs=arguments)


def close() -> None:
    run.close_pools(_Sessions)
