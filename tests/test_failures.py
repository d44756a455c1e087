"""Ranks that fail, leave early or are killed: what the others see, and how a process ends."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import job
import pytest
from conftest import CHOSEN_ENGINE
from ranks import DEAD_PROXY, SHORT_LIMITS, all_through

from npu_device._src.cluster.tracebacks import parse, without_libraries

pytestmark = pytest.mark.xdist_group("waiting")

BEGIN = """
import os, sys, time
import tensorflow as tf
import npu_device as npu
handle = npu.open().as_default()
rank = handle.worker_id
one = tf.constant(1.0)
print("sum", float(npu.distribute.all_reduce(one, "sum")), flush=True)
"""


OUT_OF_MEMORY = """
    import numpy, resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
    numpy.ones(1 << 30)
"""


WITHOUT_TEXT = """
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text")
    raise Silent"""


def _ends(directory: Path, ending: int, act: str, pending: bool) -> tuple[job.Ended, job.Ended]:
    """Run two ranks, of which one ends while the other waits in a collective, or before it; return them."""
    own_file = "import os\nos.environ['NPU_DEVICE_ERROR_FILE'] += os.environ['RANK_ID']\n"
    end = f"""
time.sleep(1 if rank == {ending} else {0 if pending else 2})
if rank == {ending}:
    print("ended at", time.time(), flush=True)
    {act.strip()}
try:
    step = tf.function(lambda: npu.distribute.all_reduce(one, "sum"))
    step()
finally:
    print("raised at", time.time(), flush=True)
"""
    results = job.run(
        directory, 2, own_file + BEGIN + end, NPU_DEVICE_ERROR_FILE=str(directory / "error")
    )
    ended, other = results[ending], results[1 - ending]
    assert job.stamp(other.output, "raised") - job.stamp(ended.output, "ended") < 5
    assert other.code == 1, other.output
    assert set(re.findall(r"rank [01] on host (\w+)", other.output)) == {"node0"}, (
        "one name for the host"
    )
    return ended, other


@pytest.mark.parametrize(
    ("failing", "act", "error"),
    [
        (
            0,
            'raise ValueError("the data of shard 7 is broken")',
            "ValueError: the data of shard 7 is broken",
        ),
        (1, OUT_OF_MEMORY, "MemoryError: Unable to allocate 8.00 GiB"),
        (1, WITHOUT_TEXT, "Silent: <exception str() failed>"),
    ],
    ids=["rank 0, in a collective", "rank 1 is out of memory, before one", "without a text"],
)
def test_an_exception_reaches_the_others_within_five_seconds(
    tmp_path: Path, failing: int, act: str, error: str
) -> None:
    failed, other = _ends(tmp_path, failing, act, pending=failing == 0)
    assert failed.code == 1, failed.output
    assert error in failed.output and error in other.output
    assert "What to do" in other.output or "Fix the error" in other.output
    # What the launcher reads
    first, second = (
        json.loads((tmp_path / f"error{rank}").read_text()) for rank in (failing, 1 - failing)
    )
    assert (first["secondary"], second["secondary"]) == (False, True)
    assert error in first["error"]
    _, failure = parse(first["traceback"].splitlines())
    assert any(act.strip().splitlines()[-1].strip() in frame.text for frame in failure.frames())
    assert second["error"].startswith(f"PeerError: rank {failing} on host")
    assert first["time"] < second["time"]
    shown, left_out = without_libraries(parse(second["traceback"].splitlines()))
    assert left_out > 5 and shown.count(f"PeerError: rank {failing} on host") == 1
    assert not re.search(r'^ *File ".*npu_device/_src', shown, re.MULTILINE)


@pytest.mark.parametrize("leaving", [1, 0], ids=["rank 1, in a collective", "rank 0, before one"])
def test_leaving_early_is_an_error_of_those_who_go_on(tmp_path: Path, leaving: int) -> None:
    left, other = _ends(tmp_path, leaving, "sys.exit(0)", pending=leaving == 1)
    assert left.code == 0, left.output
    assert left.at - other.at < 5  # rank 0 waits for the others, no longer
    assert f"rank {leaving} on host" in other.output
    assert (
        "has left the job: its script ended after 1 transfer of collective operations in"
        in other.output
    )
    assert (
        f"the script called sys.exit on rank {leaving}; a call is made on some ranks only"
        in other.output
    )
    assert "same number of steps" in other.output


@pytest.mark.slow
def test_a_rank_whose_server_the_others_may_still_read_from_waits_for_them(tmp_path: Path) -> None:
    # Between hosts, a rank that had ended right after its last collective cut off those that were still receiving.
    late = (
        "if rank == 0:\n    time.sleep(1.5)\n    print('ended at', time.monotonic(), flush=True)\n"
    )
    first, second = job.run(tmp_path, 2, BEGIN + late, **all_through("tensorflow"))
    assert (first.code, second.code) == (0, 0)
    assert second.at >= job.stamp(first.output, "ended"), second.output


def test_one_rank_may_go_on_alone_without_collectives(tmp_path: Path) -> None:
    """And leave while another one is ending already: from Python 3.12 on, an interpreter that shuts down starts no
    thread.
    """
    alone = """
import atexit
atexit.register(time.sleep, 2 if rank == 0 else 0)  # before the package's own, which was registered earlier
if rank == 1:
    time.sleep(3)
    print("evaluated at", time.monotonic(), flush=True)
"""
    results = job.run(tmp_path, 2, BEGIN + alone)
    assert [result.code for result in results] == [0, 0]
    assert not any(
        word in result.output for result in results for word in ("Abort", "Exception in thread")
    ), results
    assert results[0].at >= job.stamp(results[1].output, "evaluated"), (
        "the others need the hub, which rank 0 started"
    )


USED = """
import os
import tensorflow as tf
import npu_device as npu
if os.environ["RANK_ID"] == "1":
    value = tf.Variable(1.0)
"""


def test_used_before_open_where_the_job_needs_tensorflows_server(tmp_path: Path) -> None:
    """One rank did, and forgot to open the device; both say so."""
    script = USED + "    npu.distribute.all_reduce(value)\nnpu.open()"
    outputs = job.outputs(tmp_path, 2, script, code=1, **all_through("tensorflow"))
    assert "Failed open npu device" in outputs[0]
    for output in outputs:
        assert "TensorFlow has been used before npu.open() on rank 1 on host node0" in output
        assert "call `npu.open()` right after the imports" in output


@pytest.mark.skipif(CHOSEN_ENGINE is not None, reason="chooses the engines itself")
def test_used_before_open_where_no_engine_is_named(tmp_path: Path) -> None:
    """One rank did; all use TCP, with one warning."""
    script = (
        USED
        + "npu.open()\nprint('sum', float(npu.distribute.all_reduce(tf.ones([1000]), 'sum')[0]))"
    )
    outputs = job.outputs(tmp_path, 2, script, NPU_DEVICE_SHARED_MEMORY="off")
    assert all("sum 2.0" in output for output in outputs)
    warnings = "".join(outputs)
    assert (
        warnings.count(
            "TensorFlow's collectives can't be used between hosts, and all ranks use TCP"
        )
        == 1
    )
    assert "TensorFlow has been used before npu.open() on rank 1 on host node0" in warnings
    assert "NPU_DEVICE_BACKEND=tcp" in warnings


@pytest.mark.skipif(CHOSEN_ENGINE is not None, reason="chooses the engines itself")
def test_a_dead_proxy_in_the_environment(tmp_path: Path) -> None:
    """gRPC would reach the other ranks through it. ``mpi_ranks`` sets one for MPI."""
    limits = {
        "NPU_DEVICE_STALL_WARNING": "2",
        "NPU_DEVICE_STALL_TIMEOUT": "4",
        "no_proxy": "elsewhere",
    }
    script = BEGIN + (
        "big = tf.function(lambda: npu.distribute.all_reduce(tf.ones([100_000]), 'sum'))()\n"
        "print('sum', float(big[-1]), os.environ.get('no_grpc_proxy'))"
    )
    for output in job.outputs(
        tmp_path, 2, script, **DEAD_PROXY, **limits, **all_through("tensorflow")
    ):
        assert "sum 2.0 elsewhere,127.0.0.1" in output


def test_an_engine_that_there_is_not(tmp_path: Path) -> None:
    """An error on all ranks, or on rank 0 a warning."""
    script = BEGIN + "npu.distribute.all_reduce(tf.ones([1000]), 'sum')"
    for output in job.outputs(tmp_path, 2, script, code=1, **all_through("nccl")):
        assert "NPU_DEVICE_BACKEND is nccl, but NCCL can't be used:\n  no rank has a GPU" in output
        assert "What to do: " in output
    first, second = job.outputs(tmp_path, 2, script, NPU_DEVICE_BACKEND="shared_memory")
    assert "NPU_DEVICE_SHARED_MEMORY=required" in first and "What to do: " in first
    assert "NPU_DEVICE_SHARED_MEMORY=required" not in second


@pytest.mark.skipif(CHOSEN_ENGINE is not None, reason="chooses the engines itself")
def test_forgotten_open_is_made_good_and_close_ends_it(tmp_path: Path) -> None:
    """Where the job needs no server, after TensorFlow has been used, too."""
    script = """
import tensorflow as tf
value = tf.Variable(tf.ones([300_000]))
import npu_device as npu
print("sum", float(npu.distribute.all_reduce(tf.constant(1.0), "sum")))
rank = npu.open().worker_id
value.assign_add(tf.fill([300_000], float(rank)))
step = tf.function(lambda: npu.distribute.all_reduce(value, "sum"))
print("sum", float(step()[-1]), value.device)
npu.close()
npu.close()
try:
    npu.distribute.all_reduce(tf.constant(1.0), "sum")
except RuntimeError as error:
    print("refused:", error)
"""
    for output in job.outputs(tmp_path, 2, script):
        assert "sum 2.0" in output
        assert "sum 3.0 /job:localhost" in output
        assert "refused: " in output and "closed in this process" in output


TRANSFERS = """
import signal, threading
value = tf.ones([8_000_000])  # sending it takes most of a step
step = tf.function(lambda: npu.distribute.all_reduce(value, "sum"))
step()
if rank == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.{signal})).start()
began = time.time()
try:
    while True:
        step()
except Exception as error:
    print("after", time.time() - began, error, flush=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_stops_while_its_data_are_sent(tmp_path: Path) -> None:
    """Transfers have no limit of their own: the stall watch ends them, as it ends agreements."""
    limits = {"NPU_DEVICE_STALL_WARNING": "1", "NPU_DEVICE_STALL_TIMEOUT": "2"}
    script, jobs = BEGIN + TRANSFERS.replace("{signal}", "SIGSTOP"), []
    for engine in ("tensorflow", "tcp"):
        (directory := tmp_path / engine).mkdir()
        jobs.append(job.start(directory, 2, script, **all_through(engine), **limits))
    for ranks in jobs:
        [first] = job.finish(ranks[:1], timeout=45)
        job.kill(ranks[1:])
        assert first.code == 3, first.output
        assert "rank 1 on host node0: does not answer: stopped" in first.output


@pytest.mark.slow
def test_a_rank_that_is_killed_while_its_data_are_sent(tmp_path: Path) -> None:
    """TensorFlow crashed."""
    script = BEGIN + TRANSFERS.replace("{signal}", "SIGKILL")
    results = job.run(tmp_path, 3, script, **all_through("tensorflow"))
    for other in (results[0], results[2]):
        assert other.code == 3, other.output
        assert "rank 1 on host node0" in other.output
        assert other.at - results[1].at < 5


@pytest.mark.slow
def test_a_rank_that_goes_on_after_a_stop_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Rank 1 is stopped amid transfers for longer than any limit of the kernel for data that nobody takes."""
    steps = """
value = tf.ones([8_000_000])
step = tf.function(lambda: npu.distribute.all_reduce(value, "sum"))
print("ready", flush=True)
print("sum", [float(step()[-1]) for _ in range(40)][-1], flush=True)
"""
    ranks = job.start(tmp_path, 2, BEGIN + steps, **all_through("tcp"), **SHORT_LIMITS)
    job.wait_for(ranks[1:])
    time.sleep(0.3)
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(3)  # TCP_USER_TIMEOUT of other connections is 1 s here
    ranks[1].send_signal(signal.SIGCONT)
    for result in job.finish(ranks):
        assert result.code == 0 and "sum 2.0" in result.output, result.output


# Ends that no code of a rank sees, at the worst moments

ALL = """
if rank in KILLED:
    os.kill(os.getpid(), signal.NUMBER)
while True:
    npu.distribute.all_reduce(one, "sum")
"""
BROADCAST = """
if rank in KILLED:
    threading.Timer(0.005, os.kill, [os.getpid(), signal.NUMBER]).start()
while True:
    npu.distribute.broadcast([tf.Variable(tf.zeros([4_000_000])) for _ in range(3)])
"""


@pytest.mark.parametrize(
    ("name", "killed", "script"),
    [
        ("SIGSEGV", [1], ALL),
        ("SIGKILL", [1, 2], ALL),
        ("SIGKILL", [0], BROADCAST),
        ("SIGKILL", [1], BROADCAST),
    ],
    ids=["a crash", "two at once", "the root of a broadcast", "another rank during a broadcast"],
)
def test_ranks_that_die_are_named_to_the_rest(
    tmp_path: Path, name: str, killed: list[int], script: str
) -> None:
    script = (
        BEGIN
        + "import signal, threading\n"
        + script.replace("KILLED", str(killed)).replace("NUMBER", name)
    )
    results = job.run(tmp_path, len(killed) + 1, script)
    for rank, result in enumerate(results):
        if rank in killed:
            assert result.code == -signal.Signals[name]
            continue
        assert result.code == 1, result.output
        assert any(f"rank {place} on host" in result.output for place in killed), result.output
        assert (
            "is gone: its process ended or was killed" in result.output
            or "the hub of the job" in result.output
        )


def test_a_rank_killed_after_the_last_step(tmp_path: Path) -> None:
    """The others have what they need, and end well; npurun reports the killed one."""
    script = (
        BEGIN
        + "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1)\n"
    )
    results = job.run(tmp_path, 2, script)
    assert [result.code for result in results] == [0, -signal.SIGKILL], results


def test_ctrl_c_shows_the_lines_of_the_script_alone(tmp_path: Path) -> None:
    stop = """
class Stop(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            os.kill(os.getpid(), 2)
            time.sleep(5)
model = npu.distribute.replicate(tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(tf.ones([64, 3]), tf.ones([64, 1]), batch_size=4, verbose=0, callbacks=[Stop()])
"""
    for ended in job.run(tmp_path, 2, BEGIN + stop):
        assert ended.code in (-signal.SIGINT, 128 + signal.SIGINT), ended.output
        trace = ended.output.split("Traceback (most recent call last):")[1]
        assert "KeyboardInterrupt" in trace and "model.fit(" in trace
        assert "site-packages" not in trace


def test_the_page_names_tests_that_exist() -> None:
    tests = Path(__file__).parent
    named = re.findall(
        r"`(test_\w+\.py)(?:::(test_\w+))?`", (tests.parent / "docs" / "notes.md").read_text()
    )
    assert len(named) > 20
    assert not [
        (file, name) for file, name in named if f"def {name}" not in (tests / file).read_text()
    ]
