"""The side of pytest's plugin on a rank: a session that collects the same files, and runs the tests that it is told to.

For other plugins the session belongs to a worker, as with pytest-xdist: it has ``config.workerinput``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from npu_device._src.pools.answers import Answer
from npu_device._src.testing.marked_tests import RANK


class _Rank:
    def __init__(self) -> None:
        self.directory = Path()
        self.session: Any = None
        self._items: dict[str, pytest.Item] = {}
        self._reports: list = []
        self._warnings: list = []
        self._announced: pytest.Item | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # The process of the test shows the progress.
        if session.config.pluginmanager.has_plugin("terminalreporter"):
            session.config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session = session
        self._items = {name_of(item): item for item in session.items}
        # Imported late, since it imports TensorFlow.
        from npu_device._src.pools import worker

        worker.answer_this_and_more(Answer(True, None))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        packed_warning = (
            str(warning_message.message),
            warning_message.category.__name__,
            warning_message.filename,
            warning_message.lineno,
            when,
            nodeid,
            location,
        )
        self._warnings.append(packed_warning)

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> bool:
        # The process of the test has the timer.
        return True

    def run(self, name: str, successor: str | None, directory: str) -> Answer:
        """Run a test, and keep the fixtures that the next test of this rank needs, too."""
        from npu_device._src.training.opening import device

        item = self._items.get(name)
        if item is None:
            return Answer(
                False,
                f"this rank doesn't collect {name}; do names or parameters depend on the rank?",
            )
        self.directory = Path(directory)
        self._reports = []
        self._warnings = []
        # Each test may set a seed of its own.
        device.forget_seed()
        config = item.config
        # The announced test may need different fixtures.
        if self._announced is not item:
            self.session._setupstate.teardown_exact(item)
        self._announced = self._items.get(successor or "")
        config.hook.pytest_runtest_protocol(item=item, nextitem=self._announced)
        packed_reports = [
            config.hook.pytest_report_to_serializable(config=config, report=report)
            for report in self._reports
        ]
        has_failed = any(report.failed for report in self._reports)
        return Answer(not has_failed, (packed_reports, self._warnings))


def name_of(item: pytest.Item) -> str:
    """Return the name of a test without the group that pytest-xdist writes behind it."""
    mark = item.get_closest_marker("xdist_group")
    if mark is None:
        return item.nodeid
    group = next(iter(mark.args), mark.kwargs.get("name", "default"))
    return item.nodeid.removesuffix(f"@{group}")


_session: _Rank | None = None
# Plugins that repeat a test that has failed. A rank that repeats one alone would wait for the others.
_REPEATING = ("rerunfailures", "flaky", "pytest-retry")


def session(
    directory: str, options: dict[str, Any], files: list[str], worker_input: dict[str, Any]
) -> Any:
    """Be a pytest session until there are no more calls. Answers when the files are collected."""
    from npu_device._src.training.distribute.ranks import rank

    global _session
    os.chdir(directory)
    # pytest removes old temporary folders, which must not belong to another rank.
    config = pytest.Config.fromdictargs(
        {**options, "basetemp": f"{options['basetemp']}-rank{rank()}"},
        files,
    )
    for name in filter(config.pluginmanager.has_plugin, _REPEATING):
        config.pluginmanager.unregister(name=name)
        config.addinivalue_line("markers", "flaky: has no effect on ranks")
    as_worker: Any = config
    as_worker.workerinput = {**worker_input, "workerid": f"{worker_input['workerid']}rank{rank()}"}
    as_worker.workeroutput = {}
    _session = _Rank()
    config.stash[RANK] = _session
    config.pluginmanager.register(_session, "npu_rank")
    code = config.hook.pytest_cmdline_main(config=config)
    return Answer(
        _session.session is not None,
        f"its pytest session ended with {code!r} before the first test",
    )


def test(name: str, successor: str | None, directory: str) -> Answer:
    assert _session is not None
    return _session.run(name, successor, directory)
