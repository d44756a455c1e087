"""pytest's plugin: tests with the mark ``ranks`` in pytest runs of their own, as users start them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import launcher
import pytest
from ranks import PYTHONPATH

pytestmark = pytest.mark.xdist_group("testing")

OUTCOMES = """
    import random
    import time
    import warnings
    import pytest
    import npu_device as npu

    @pytest.fixture(scope="module")
    def made(tmp_path_factory):
        print("made once")
        yield tmp_path_factory.mktemp("made")
        print("taken back")

    @pytest.fixture(scope="module")
    def without_ranks():
        yield
        assert False, "the module has ended"

    def test_without_ranks(npu_ranks, job_tmp_path, tmp_path, without_ranks):
        assert (npu_ranks, job_tmp_path) == (1, tmp_path)

    @pytest.mark.ranks(1, 2)
    @pytest.mark.parametrize("word", ["a", "b"])
    def test_passes(npu_ranks, word, made, tmp_path, job_tmp_path, capsys):
        rank = npu.distribute.rank()
        npu.open(seed=ord(word))
        assert random.random() == random.Random(ord(word)).random()
        print("hello")
        assert capsys.readouterr().out == "hello\\n"
        (made / word).touch()
        (tmp_path / word).touch()
        (job_tmp_path / str(rank)).touch()
        npu.distribute.barrier()
        assert [len(list(path.iterdir())) for path in (tmp_path, job_tmp_path)] == [1, npu_ranks]
        assert npu.distribute.size() == npu_ranks
        if rank == 0:
            warnings.warn("careful")

    @pytest.mark.ranks(2)
    class TestEnds:
        def test_fails_on_one(self):
            rank = npu.distribute.rank()
            print("rank", rank, "was here")
            assert rank == 0, "only one"
            npu.distribute.all_reduce(1.0)

        def test_skips_alone(self):
            if npu.distribute.rank() == 1:
                pytest.skip("no reason")

        @pytest.mark.skip(reason="on all")
        def test_skips(self): ...

        @pytest.mark.xfail(strict=True)
        def test_fails_as_expected(self):
            assert npu.distribute.size() == 3

        @pytest.mark.ranks(2, limit=1)
        def test_hangs(self):
            while npu.distribute.rank() == 1:
                time.sleep(0.1)

    @pytest.fixture
    def broken():
        assert npu.distribute.size() == 3

    @pytest.mark.ranks(2)
    def test_fixture_fails(broken): ...
"""


def start(directory: Path, *arguments: str, **files: str) -> subprocess.Popen[str]:
    """Start pytest in a project of these test files."""
    for name, text in files.items():
        launcher.script(directory, text, f"{name}.py")
    temporary = directory / "temporary"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        env={**launcher.environment(), "PYTHONPATH": PYTHONPATH, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(directory: Path, *arguments: str, **files: str) -> str:
    """Run pytest in a project of these test files; return its output. Nothing may be left."""
    shared = launcher.shared_files()
    process = start(directory, *arguments, **files)
    output, _ = process.communicate(timeout=120)
    assert_nothing_is_left(directory, shared)
    return output


def assert_nothing_is_left(directory: Path, shared: set[str]) -> None:
    """No processes, shared memory, sockets and directories of a project's run."""
    launcher.wait_until(lambda: not of_run(directory))
    launcher.assert_no_shared_files_since(shared)
    assert {path.name.partition("-")[0] for path in (directory / "temporary").iterdir()} <= {
        "pytest"
    }
    assert not [path for path in directory.rglob("*") if path.is_socket()]


def test_each_outcome_is_reported(tmp_path: Path) -> None:
    output = run(tmp_path, "-v", test_outcomes=OUTCOMES, test_plain="def test_after(): ...")
    # The first outcome of a test counts, since errors of a teardown follow.
    seen = dict(reversed(re.findall(r"^\S+py::(\S+) (\w+)", output, re.MULTILINE)))
    passing = [f"test_passes[{ranks}-{word}]" for ranks in ("1rank", "2ranks") for word in "ab"]
    ends = {
        "fails_on_one": "FAILED",
        "skips_alone": "FAILED",
        "skips": "SKIPPED",
        "hangs": "FAILED",
    }
    ends["fails_as_expected"] = "XFAIL"
    assert seen == {
        **dict.fromkeys([*passing, "test_without_ranks", "test_after"], "PASSED"),
        **{f"TestEnds::test_{name}[2ranks]": outcome for name, outcome in ends.items()},
        "test_fixture_fails[2ranks]": "ERROR",
    }, output
    assert re.search(
        r'\n> +assert rank == 0, "only one"\nE +AssertionError: only one\nE +assert 1 == 0', output
    )
    assert (
        "failed first on rank 1 of 2, then on rank(s) 0" in output and "rank 1 was here" in output
    )
    assert "PeerError: rank 1 on host" in output, "rank 0's error, when rank 1 had left it alone"
    assert "rank(s) [1] skipped the test (Skipped: no reason), and rank(s) [0] ran it." in output
    assert re.search(
        r"no answer within 1 s; rank\(s\) \[0\] have returned. It was here:\n(  File .*\n)* .* in test_hangs",
        output,
    )
    assert "UserWarning: careful" in output
    # The last test of the module, which ran on ranks, ends a fixture of the tests without ranks.
    assert re.search(
        r"ERROR at teardown of test_passes\[2ranks-b\](.|\n)*E +AssertionError: the module has ended",
        output,
    )


BUSY = """
    import time
    import pytest
    import npu_device as npu
    import mine

    pytestmark = pytest.mark.xdist_group("one process")

    @pytest.mark.ranks(1, 2)
    def test_covered(worker_id):
        assert mine.double(npu.distribute.rank()) == 2 * npu.distribute.rank()
        assert worker_id.startswith("gw") and worker_id.endswith(f"rank{npu.distribute.rank()}")

    @pytest.mark.ranks(2)
    @pytest.mark.timeout(2)
    def test_is_stopped():
        time.sleep(60)

    def test_beside(): ...
"""


def test_beside_other_plugins(tmp_path: Path) -> None:
    for plugin in ("xdist", "pytest_cov", "pytest_timeout"):
        pytest.importorskip(plugin)
    mine = "def double(value):\n    twice = 2 * value\n    return twice\n"
    output = run(
        tmp_path, "-n", "2", "--dist", "loadgroup", "--cov", "mine", test_busy=BUSY, mine=mine
    )
    assert re.search(r"^mine.py +3 +0 +100%$", output, re.MULTILINE), output
    assert "1 failed, 3 passed" in output
    assert re.search(r"Timeout \(>2.0s\) from pytest-timeout.(.|\n)*in test_is_stopped", output)


REPEATED = """
    import pathlib
    import pytest
    import npu_device as npu

    @pytest.mark.flaky(reruns=2)
    @pytest.mark.ranks(2)
    def test_fails_on_one():
        rank = npu.distribute.rank()
        with pathlib.Path(f"ran{rank}").open("a") as runs:
            runs.write("once ")
        assert rank == 0, "only one"
        npu.distribute.all_reduce(1.0)
"""


def test_no_rank_repeats_a_test_alone(tmp_path: Path) -> None:
    pytest.importorskip("pytest_rerunfailures")
    options = ("-n", "1", "--dist", "loadgroup", "--reruns", "1", "--strict-markers")
    output = run(tmp_path, *options, test_repeated=REPEATED)
    assert "failed first on rank 1 of 2" in output and "1 failed" in output, output
    assert [(tmp_path / f"ran{rank}").read_text() for rank in range(2)] == ["once "] * 2


STUCK = """
    import os, pathlib, time
    import pytest
    import npu_device as npu

    @pytest.mark.ranks(2, limit=LIMIT)
    def test_stuck():
        npu.distribute.all_reduce(1.0)
        pathlib.Path(f"pid{npu.distribute.rank()}").write_text(str(os.getpid()))
        while npu.distribute.rank() == 1:
            time.sleep(0.1)
        npu.distribute.all_reduce(1.0)

    @pytest.mark.ranks(2)
    def test_next(): ...
"""


def test_stops_at_the_first_failure(tmp_path: Path) -> None:
    assert "stopping after 1 failures" in run(
        tmp_path, "-x", test_stuck=STUCK.replace("LIMIT", "1")
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """When pytest is killed, its files stay."""
    shared = launcher.shared_files()
    process = start(tmp_path, test_stuck=STUCK.replace("LIMIT", "300"))
    launcher.wait_for_files(tmp_path, "pid*", 2)
    assert {os.getpgid(pid) for pid in of_run(tmp_path)}.issuperset({process.pid}) and len(
        of_run(tmp_path)
    ) >= 4
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in output, output
        assert_nothing_is_left(tmp_path, shared)
    launcher.wait_until(lambda: not of_run(tmp_path))
    launcher.assert_no_shared_files_since(shared)


def of_run(directory: Path) -> list[int]:
    """Return the processes that run in or for a project: their environment names it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if str(directory).encode() in path.read_bytes() and launcher.is_running(
                pid := int(path.parent.name)
            ):
                found.append(pid)
    return found


def test_a_wrong_mark_fails_the_collection(tmp_path: Path) -> None:
    """A wrong mark is an error, and the number of ranks can be chosen."""
    text = "import pytest\n@pytest.mark.{}\ndef test_it(): ...\n"
    marks = ("ranks()", "ranks(0)", "ranks(2, limits=3)")
    wrong = {f"test_{place}": text.format(mark) for place, mark in enumerate(marks)}
    output = run(tmp_path, "--co", "--npu-ranks", "2", test_outcomes=OUTCOMES, **wrong)
    assert output.count("expected numbers, as in @pytest.mark.ranks(1, 2, 3)") >= 2
    assert "the mark ranks has no limits" in output
    assert "[2ranks" in output and "[1rank" not in output and "without" in output


def test_the_plugin_is_light() -> None:
    code = """
import sys
import pytest
before = set(sys.modules)
import npu_device._src.testing.plugin
print(*(name for name in set(sys.modules) - before if "." not in name))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = set(done.stdout.split())
    assert new.isdisjoint({"tensorflow", "keras", "numpy"}) and "npu_device" in new
