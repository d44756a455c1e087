"""Calls that don't match are one error on every rank, within seconds, with one line for each rank."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any, Callable

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of
from pool import Pool
from ranks import table_environment

import npu_device as npu
from npu_device.distribute import hccl_ops


def _calls(rank: int) -> dict[str, Callable[[], Any]]:
    reduce, broadcast = npu.distribute.all_reduce, npu.distribute.broadcast
    three, four, odd = tf.ones([3]), tf.ones([4]), rank == 1
    size = npu.open().workers_num
    counts = np.eye(size, dtype=int) * (2 if odd else 1)
    variable = tf.Variable(1.0)
    sparse = tf.IndexedSlices(tf.ones([1, 2]), [0], [4, 2])
    return {
        "shape": lambda: reduce(three if odd else four),
        "dtype": lambda: reduce(tf.cast(three, tf.float64) if odd else three),
        "reduction": lambda: reduce(three, "sum" if odd else "max"),
        "root": lambda: broadcast(variable, root_rank=int(odd)),
        "operation": lambda: broadcast(variable) if odd else reduce(three),
        "counts": lambda: hccl_ops.all_to_all_v_c(three, counts, rank),
        "order of two calls": lambda: [
            reduce(value) for value in ((three, four) if odd else (four, three))
        ],
        "None on one rank": lambda: reduce([three, None if odd else four]),
        "dense against sparse": lambda: reduce([sparse if odd else tf.ones([4, 2])]),
        "number of tensors": lambda: reduce([three] * (3 if odd else 2)),
        "keys": lambda: reduce({"loss": three, "steps" if odd else "accuracy": three}),
        "keys of a mean": lambda: npu.distribute.weighted_mean([{"b" if odd else "a": three}], 1),
    }


EXPECTED = {
    "counts": ["differ in: send_count_matrix", "[[2, 0", "[[1, 0"],
    "shape": ["shape or kind of tensor 0", "float32 [3]", "float32 [4]"],
    "dtype": ["shape or kind of tensor 0", "float64 [3]", "float32 [3]"],
    "reduction": ["differ in: reduction", "reduction=max", "reduction=sum"],
    "root": ["differ in: root_rank", "root_rank=1", "root_rank=0"],
    "operation": ["operation", "broadcast", "all_reduce"],
    "order of two calls": ["float32 [3]", "float32 [4]"],
    "None on one rank": ["shape or kind of tensor 1", "tensor 1 -: None", "float32 [4]"],
    "dense against sparse": ["sparse float32 rows of [2]", "float32 [4, 2]"],
    "number of tensors": ["number of tensors", "of 3 tensors", "of 2 tensors"],
    "keys": ["differ in: keys", "keys=loss, steps", "keys=accuracy, loss"],
    "keys of a mean": ["differ in: keys", "keys=b", "keys=a"],
}


def body_mismatch(case: str) -> tuple[float, float, str, list[float]]:
    call = _calls(npu.open().worker_id)[case]
    npu.distribute.all_reduce(tf.ones([3]))
    began, text = time.time(), error_of(call)
    # Nothing had moved: the next call works.
    return began, time.time(), text, npu.distribute.all_reduce(tf.ones([2]), "sum").numpy().tolist()


@pytest.mark.more_engines("tcp", "mpi", "Open MPI", case=["dtype", "dense against sparse"])
@pytest.mark.parametrize("case", EXPECTED)
def test_calls_that_do_not_match(several_ranks: Pool, case: str) -> None:
    size = several_ranks.size
    results = several_ranks.run(body_mismatch, case)
    last_arrival = max(began for began, *_ in results)
    assert len({text for *_, text, _ in results}) == 1, "every rank says the same"
    for _, ended, text, after in results:
        assert text.startswith("MismatchError: "), text
        assert ended - last_arrival < 10
        for rank in range(size):
            line = rf"rank {rank} on host \w+: .* called at .*test_agreement\.py:\d+ "
            assert re.search(line, text), text
        for part in (*EXPECTED[case], "What to do: make every rank call the same operations"):
            assert part in text
        assert after == [size] * 2


def test_calls_in_a_graph_that_nobody_uses_and_that_do_not_match(tmp_path: Path) -> None:
    script = IN_A_FUNCTION.replace("step(three)", "step(tf.ones([4 - rank]))") + AFTERWARDS
    outputs = job.outputs(tmp_path, 2, script, code=1)
    last_arrival = max(job.stamp(output, "calls") for output in outputs)
    for output in outputs:
        assert "[2. 2. 2.]" in output
        assert "refused" in output and "went on" not in output
        assert job.stamp(output, "raised") - last_arrival < 20  # tracing, and 2 s
        for rank in range(2):  # in code that AutoGraph rewrites
            assert re.search(
                rf"rank {rank} on host \w+: .* called at .*script\.py:8 \(step\)", output
            ), output
        assert "shapes that only the running graph knows" in output and "float32 [?]" in output


WAITING = """
import time
import tensorflow as tf
import npu_device as npu
from hccl.manage.api import create_group, destroy_group
rank, three = npu.open().worker_id, tf.ones([3])
npu.distribute.all_reduce(three)  # the kernels are warm
for _ in range(5):  # waits in groups of one name are not one long wait
    create_group("again", 2, [0, 1])
    time.sleep(0.9 * rank)
    npu.distribute.all_reduce(three, group="again")
    destroy_group("again")
time.sleep(2 * rank)
print(npu.distribute.all_reduce(three, "sum"), flush=True)
create_group("pair", 2 - rank, list(range(rank, 2)))
print("calls at", time.time(), flush=True)
try:
    npu.distribute.all_reduce(three, group="pair")
    time.sleep(8)
finally:
    print("raised at", time.time(), flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_comes_late_is_named_and_waited_for_until_the_limit(tmp_path: Path) -> None:
    results = job.run(
        tmp_path, 2, WAITING, NPU_DEVICE_STALL_WARNING="1", NPU_DEVICE_STALL_TIMEOUT="4"
    )
    assert [result.output.count("[2. 2. 2.]") for result in results] == [1, 1]
    output = results[0].output
    assert results[0].code == 1 and "rank 0 has waited" in output
    assert re.search(
        r"rank 1 on host \w+: hasn't arrived: 1 of 2 transfers begun; last call: all_reduce", output
    )
    assert "is waiting (all_reduce called at" in output
    assert "rank 1 on host node0: has made a different group of this name, with ranks 1" in output
    assert "This is the limit (NPU_DEVICE_STALL_TIMEOUT" in output
    assert job.stamp(output, "raised") - job.stamp(output, "calls") < 12


IN_A_FUNCTION = """
import time, tensorflow as tf, npu_device as npu
rank, three = npu.open().worker_id, tf.ones([3])

@tf.function(autograph=True, input_signature=[tf.TensorSpec([None])])
def step(x):
    for i in tf.range(2):
        x = npu.distribute.all_reduce(x, "sum")  # line 8
    return x

tf.function(lambda: (npu.distribute.all_reduce(three), three)[1], autograph=False)()  # the result isn't used
print(npu.distribute.all_reduce(three, "sum"))
print("calls at", time.time(), flush=True)
try:
    step(three)
finally:
    print("raised at", time.time(), flush=True)
"""

# The rank has stopped: it begins no transfer, although the other rank comes at once.
AFTERWARDS = """
    try:
        print("went on", step(three), flush=True)
    except tf.errors.UnknownError as error:
        print("refused", error, flush=True)
"""


@pytest.mark.slow
def test_a_script_whose_path_is_not_ascii(tmp_path: Path) -> None:
    """Where Python isn't in UTF-8 mode, AutoGraph and TensorFlow's own errors fail by themselves (TensorFlow 2.20)."""
    folder = tmp_path / "Größe"
    folder.mkdir()
    script = IN_A_FUNCTION.replace("autograph=True", "autograph=False").replace("tf.range", "range")
    (folder / "script.py").write_text(script)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environments = [{**table_environment(tmp_path, 2, rank), **ascii_only} for rank in range(2)]
    for result in job.run_anew([[sys.executable, str(folder / "script.py")]] * 2, environments):
        assert result.code == 0, result.output
