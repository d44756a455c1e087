"""Ends of ranks that no code of theirs sees, at the worst moments: the others know within seconds."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import job
import pytest
from test_failures import BEGIN

pytestmark = pytest.mark.xdist_group("waiting")

ALL = """
npu.distribute.all_reduce(one, "sum")
"""
BROADCAST = """
values = [tf.Variable(tf.zeros([4_000_000])) for _ in range(3)]
npu.distribute.broadcast(values)
"""


@pytest.mark.parametrize(
    ("number", "killed", "after"),
    [
        (signal.SIGSEGV, [1], ALL),
        (signal.SIGKILL, [1, 2], ALL),
        (signal.SIGKILL, [0], BROADCAST),
        (signal.SIGKILL, [1], BROADCAST),
    ],
    ids=["a crash", "two at once", "the root of a broadcast", "another rank during a broadcast"],
)
def test_ranks_that_die_are_named_to_the_rest(tmp_path: Path, number: int, killed: list[int], after: str) -> None:
    script = (
        BEGIN
        + f"""
import signal, threading
if rank in {killed}:  # in the midst of what follows
    threading.Timer(0.005 if "broadcast" in {after!r} else 0.0, os.kill, [os.getpid(), {int(number)}]).start()
    if "broadcast" not in {after!r}:
        time.sleep(30)
began = time.time()
try:
    for _ in range(1000):
{after.strip().replace(chr(10), chr(10) + " " * 8).join([" " * 8, ""])}
finally:
    print("seconds", time.time() - began, flush=True)
"""
    )
    results = job.run(tmp_path, 3, script)
    for rank, result in enumerate(results):
        if rank in killed:
            assert result.code == -number
            continue
        assert result.code == 1, result.output
        told = [place for place in killed if f"rank {place} on host" in result.output]
        assert told, result.output
        assert "is gone: its process ended or was killed" in result.output or "the hub of the job" in result.output


def test_a_rank_killed_after_the_last_step(tmp_path: Path) -> None:
    """The others have what they need, and end well; npurun reports the killed one."""
    script = BEGIN + "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1)\n"
    results = job.run(tmp_path, 3, script)
    assert [result.code for result in results] == [0, -signal.SIGKILL, 0], results


def test_the_page_names_tests_that_exist() -> None:
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "notes.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", page)
    assert len(named) > 20
    missing = [(file, name) for file, name in named if f"def {name}" not in (tests / file).read_text()]
    assert not missing
