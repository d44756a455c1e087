"""``npu_device.testing.run``: a function on real ranks, its results and its errors."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
from ranks import PYTHONPATH

import npu_device as npu
from npu_device import testing
from npu_device._src.cluster.time_limits import POOL_RELEASE_SECONDS
from npu_device._src.pools import pool
from npu_device._src.pools.forked import ForkedProcess

pytestmark = pytest.mark.xdist_group("testing")

run = partial(testing.run, keras=3, environment={"PYTHONPATH": PYTHONPATH})


def place(factor: int) -> tuple[int, int, Any]:
    rank, size = npu.distribute.rank(), npu.distribute.size()
    return factor * rank, size, np.asarray(npu.distribute.all_reduce(np.float32(rank), "sum"))


def test_results_come_in_order_of_rank() -> None:
    for size in (1, 3):
        assert run(place, 10, ranks=size) == [
            (10 * rank, size, sum(range(size))) for rank in range(size)
        ]


def be_killed_while_others_work() -> None:
    if npu.distribute.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # Longer than the ranks are given to leave once one of them has failed.
    time.sleep(POOL_RELEASE_SECONDS + 2)


def test_a_killed_rank_is_told_also_while_the_others_work() -> None:
    with pytest.raises(testing.RankError, match="rank 1 of 2:\nits process was killed by SIGKILL"):
        run(be_killed_while_others_work, ranks=2)


def change_everything() -> tuple[int, Any]:
    import keras
    import tensorflow as tf

    seen = (
        os.getpid(),
        (os.getcwd(), os.environ.get("CHANGED"), keras.layers.Dense(1).name, keras.backend.floatx(), random.random(),
         float(np.random.uniform()), keras.config.dtype_policy().name, tf.config.functions_run_eagerly()),
    )  # fmt: skip
    os.chdir("/")
    os.environ["CHANGED"] = "1"
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")
    tf.config.run_functions_eagerly(True)
    return seen


def test_ranks_are_used_again_and_are_as_at_their_start() -> None:
    first = run(change_everything)
    assert first == run(change_everything)
    assert [pid for pid, _ in run(change_everything, fresh=True)] != [pid for pid, _ in first]


def draw(seed: int) -> float:
    npu.open(seed=seed)
    return random.random()


def test_each_call_may_set_a_seed() -> None:
    for seed in (1, 1, 2):
        assert run(draw, seed) == [random.Random(seed).random()] * 2


def fail(wrong: int) -> None:
    if npu.distribute.rank() == wrong:
        print("what rank", wrong, "printed")
        raise ValueError(f"on rank {wrong} only")
    npu.distribute.all_reduce(1.0)


def test_the_error_of_the_first_rank_to_fail_comes_first() -> None:
    with pytest.raises(testing.RankError) as caught:
        run(fail, 1, ranks=3)
    text = str(caught.value)
    assert next(iter(caught.value.errors)) == 1 and set(caught.value.errors) == {0, 1, 2}
    assert re.match(
        r"\s*rank 1 of 3:\nTraceback .*\n  File .*test_testing_run.py.* in fail\n", text
    )
    assert text.index("ValueError: on rank 1 only") < text.index("rank 0 of 3:")
    assert "what rank 1 printed" in text[text.index("output of rank 1") :]


def hang_on(who: int) -> None:
    while npu.distribute.rank() == who:
        time.sleep(0.1)


def all_reduce_alone() -> None:
    if npu.distribute.rank() == 0:
        npu.distribute.all_reduce(1.0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            partial(hang_on, 1),
            r"rank 1 of 2:\nno answer within 2 s; rank\(s\) \[0\] have returned(.|\n)* in hang_on\n",
        ),
        (
            all_reduce_alone,
            r"rank 0 of 2:\nno answer within 2 s(.|\n)* in all_reduce_alone\n(.|\n)*rank 1 on host",
        ),
    ],
    ids=["hangs", "leaves a collective open"],
)
def test_a_body_that_does_not_return(body: Any, says: str) -> None:
    with pytest.raises(testing.RankError, match=says):
        run(body, limit=2)


SCRIPT = """
from npu_device import testing

def body(): ...

class Body: ...

if __name__ == "__main__":
    testing.CALL
"""


def end(how: str) -> Any:
    if how == "exit":
        os._exit(3)
    if how == "lambda":
        return lambda: 0
    return None


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (partial(run, lambda: 0), TypeError, r"<lambda> is a lambda(.|\n)*define it with def"),
        (
            partial(run, place, [lambda: 0]),
            TypeError,
            r"<lambda> is a lambda(.|\n)*define it with def",
        ),
        (
            partial(run, place, threading.Lock()),
            TypeError,
            r"one of its arguments can't be sent .* '_thread.lock'",
        ),
        (
            partial(run, end, "lambda"),
            testing.RankError,
            r"the function returned function, which can't be sent",
        ),
        (partial(run, end, "exit"), testing.RankError, r"its process ended with exit code 3"),
        (partial(run, place, ranks=0), ValueError, r"ranks=0: expected a whole number"),
        (partial(testing.run, place, keras=1), ValueError, r"keras=1: expected 2, 3, or None"),
        (
            partial(run, place, ranks=100_000),
            MemoryError,
            r"100000 ranks need about .* MiB of memory",
        ),
    ],
)
def test_bad_input_is_a_clear_error(body: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        body()


def test_memory_that_a_container_leaves_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "free_memory", lambda: 1 << 20)
    with pytest.raises(MemoryError, match=r"2 ranks need about .*; 1 MiB are free"):
        run(place, ranks=2, fresh=True)


def test_threads_that_start_processes_know_them_by_their_numbers(tmp_path: Path) -> None:
    """A number of another thread's process would let a time limit end that one."""
    started: list[ForkedProcess] = []

    def start(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        for _ in range(3):
            started.extend(job.start(directory, 1, "import os\nprint(os.getpid())"))

    threads = [threading.Thread(target=start, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in started:
        assert process.wait() == 0 and int(process.output) == process.pid


@pytest.mark.parametrize(
    ("call", "name"),
    [("equal_to_one_process(body, ([], []))", "body"), ("run(print, [Body()])", "Body")],
)
def test_what_the_script_itself_defines(tmp_path: Path, call: str, name: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("CALL", call))
    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False
    )
    assert (
        ended.returncode == 1
        and f"TypeError: {name} is defined in the script or notebook that runs" in ended.stderr
    )
    assert "What to do: put it into a module of its own" in ended.stderr


def test_a_script_ends_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("CALL", "run(print, 'said', ranks=1)"))
    temporary = tmp_path / (
        "job_" + "x" * 120
    )  # as batch systems name it; a socket's name has at most 107 characters
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(temporary)}
    command = [sys.executable, tmp_path / "script.py"]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0 and "Error" not in ended.stderr, ended.stderr
    assert not list(temporary.iterdir())
