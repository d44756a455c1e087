"""pytest's plugin: ``@pytest.mark.ranks(1, 2, 3)`` runs a test on real ranks. See ``docs/testing.md``.

It is loaded in every pytest run of an environment with this package: it imports pytest and the standard library only,
and does nothing until a test has the mark. ``pytest_job`` runs the tests, ``pytest_rank`` is the ranks' side.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from npu_device._src.testing.marked_tests import PARAMETER, RANK, size_of

_MARK = (
    "ranks(*sizes, keras=None, environment={}, limit=300): run the test on that many real ranks, each size in turn; "
    "limit is in seconds"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the tests with the mark ranks, run only those on these numbers of ranks (such as 2, or 1,3)"
    parser.getgroup("npu_device").addoption("--npu-ranks", metavar="SIZES", type=_sizes, help=text)


def _sizes(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    config.pluginmanager.register(_Start(), "npu_start")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    sizes = mark.args
    # A bool is refused, which is an int for Python.
    if not sizes or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes
    ):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: expected numbers, as in @pytest.mark.ranks(1, 2, 3)"
        )
    if unknown := set(mark.kwargs) - {"keras", "environment", "limit"}:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the mark ranks has no {', '.join(sorted(unknown))}"
        )
    if PARAMETER not in metafunc.fixturenames:
        metafunc.fixturenames.append(PARAMETER)
    singular = {1: "1rank"}
    ids = [singular.get(size, f"{size}ranks") for size in sizes]
    metafunc.parametrize(PARAMETER, sizes, indirect=True, ids=ids, scope="session")


# Called before pytest-xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sizes = config.option.npu_ranks
    has_xdist = config.pluginmanager.hasplugin("xdist")
    selected = []
    deselected = []
    for item in items:
        size = size_of(item)
        is_marked = item.get_closest_marker("ranks") is not None
        if is_marked and size is None:
            raise pytest.UsageError(
                f"{item.nodeid}: the mark ranks is for functions, not for methods of unittest"
            )
        if is_marked and sizes and size not in sizes:
            deselected.append(item)
            continue
        if is_marked and has_xdist and item.get_closest_marker("xdist_group") is None:
            # The tests of one number of ranks share a process, and so its ranks.
            item.add_marker(pytest.mark.xdist_group(f"{size}ranks"))
        selected.append(item)
    if deselected:
        # pytest shows the number of tests that an option leaves out.
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


class _Start:
    """Starts ranks before the timer of pytest-timeout, which may allow for the test alone."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if size_of(item) is not None and RANK not in item.config.stash:
            from npu_device._src.testing import pytest_job

            pytest_job.start(item)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if size_of(item) is None or RANK in item.config.stash:
        return None
    from npu_device._src.testing import pytest_job

    return pytest_job.run_test(item, nextitem)


# Within pytest-cov's, so that the ranks have saved what they measured.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        # The module isn't imported if no test had the mark.
        if job := sys.modules.get("npu_device._src.testing.pytest_job"):
            job.close()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (run := sys.modules.get("npu_device._src.testing.run")) and RANK not in config.stash:
        run.close()


@pytest.fixture(scope="session")
def npu_ranks(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run the test; 1 without the mark ``ranks``."""
    return int(getattr(request, "param", 1))


@pytest.fixture
def job_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A new directory that the ranks of a test share; each rank has a ``tmp_path`` of its own."""
    rank = request.config.stash.get(RANK, None)
    if rank is None:
        rank_path: Path = request.getfixturevalue("tmp_path")
    else:
        rank_path = rank.directory
    return rank_path
