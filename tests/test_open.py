"""``npu.open`` with real TensorFlow underneath: every scheme of the environment, the handle, and this rank's share of
the host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import job
import pytest
import tensorflow as tf
from pool import Pool
from ranks import free_port, table_environment
from rendezvous_ranks import by_table, by_tf_config, without_table

import npu_device as npu

SCRIPT = """
import numpy as np
import npu_device as npu
handle = npu.open().as_default()
total = npu.distribute.all_reduce(np.float32(handle.worker_id + 1), "sum")
print("rank", handle.worker_id, "of", handle.workers_num, "sum", float(total), handle.name(), flush=True)
"""
# Then another job comes to the same process, as to Spark's.
ANOTHER_JOB = """
import json, os
task = {"type": "worker", "index": 2}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": task})
try:
    print("same" if npu.open() is handle else "another")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("by_cm", [True, False], ids=["CM_*", "TF_CONFIG"])
def test_two_ranks_without_a_rank_table(tmp_path: Path, by_cm: bool) -> None:
    port, scheme = free_port(), without_table if by_cm else by_tf_config
    environments = [{**scheme(port, 2, rank), "HCCL_CONNECT_TIMEOUT": "60"} for rank in range(2)]
    results = job.finish(job.start_each(tmp_path, SCRIPT + ANOTHER_JOB, environments))
    for rank, result in enumerate(results):
        assert result.code == 0, result.output
        assert (
            f"rank {rank} of 2 sum 3.0 /job:localhost/replica:0/task:0/device:NPU:" in result.output
        )
        if by_cm:
            assert "TF_CONFIG" in result.output and "CM_WORKER_SIZE" in result.output
        else:
            assert (
                f"rank 2 of 3, but npu.open() has made it rank {rank} of 2 of another job"
                in result.output
            )
            assert "spark.python.worker.reuse=false" in result.output


OPEN_PORTS = """
import numpy as np, tensorflow as tf, npu_device as npu
npu.open()
npu.distribute.all_reduce(np.float32(1), "sum")
model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
npu.distribute.replicate(model).fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
"""


@pytest.mark.parametrize(
    ("engine", "statement", "number"),
    [("tensorflow", "on", 1), ("tensorflow", "off", 0), ("tcp", "on", 0)],
)
def test_rank_0_says_once_which_ports_are_open(
    tmp_path: Path, engine: str, statement: str, number: int
) -> None:
    variables = {"NPU_DEVICE_SHARED_MEMORY": "off", "NPU_DEVICE_BACKEND": engine}
    first, second = job.outputs(
        tmp_path, 2, OPEN_PORTS, NPU_DEVICE_STATEMENT=statement, **variables
    )
    said = re.findall(
        "^npu_device: TensorFlow's servers at .+:[0-9]+, .+:[0-9]+ are open to everyone who can connect, .+"
        "NPU_DEVICE_BACKEND=tcp does without them; a firewall can limit them to the hosts of the job",
        first,
        flags=re.MULTILINE,
    )
    assert len(said) == first.count("open to everyone") == number, first
    assert "open to everyone" not in second


NEVER_OPENED = """
import os, sys
import tensorflow as tf
from npu_bridge.npu_init import *
if os.environ["KIND"] == "child":
    pid = os.fork()  # which ends as the script does
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
print(float(tf.constant(1.0)), flush=True)
assert os.environ["KIND"] != "error"
"""


def test_a_rank_that_never_opens_warns_at_its_end(tmp_path: Path) -> None:
    """Not a child, an error, a single rank, or ranks of npurun, which warns itself."""
    table, kinds = table_environment(tmp_path, 2, 1), ("alone", "child", "error", "npurun")
    environments = [{**table, "KIND": kind} for kind in kinds] + [
        {**table_environment(tmp_path, 1, 0), "KIND": "one"}
    ]
    environments[kinds.index("npurun")]["NPU_DEVICE_ERROR_FILE"] = str(tmp_path / "error")
    for kind, ended in zip(
        [*kinds, "one"], job.finish(job.start_each(tmp_path, NEVER_OPENED, environments))
    ):
        assert (ended.code, "1.0" in ended.output) == (kind == "error", True), ended.output
        assert ("never opened npu_device" in ended.output) == (kind == "alone"), (
            kind,
            ended.output,
        )
        if kind == "alone":
            assert (
                "script.py) one of 2 ranks" in ended.output
                and "What to do: add `import npu_device" in ended.output
            )


def body_handle() -> None:
    handle, rank, size = npu.open(), npu.distribute.rank(), npu.distribute.size()
    assert (
        npu.open() is handle
        and handle.as_default() is handle
        and npu.npu_device.global_npu_ctx() is handle
    )
    with pytest.raises(
        RuntimeError, match=r"device 7 can't be opened(.|\n)*one process per device"
    ):
        npu.open(7)
    with handle.scope():
        assert tf.constant(1.0).device.endswith("CPU:0")
    assert handle.name() == f"/job:localhost/replica:0/task:0/device:NPU:{rank}"
    assert (handle.is_cluster_worker(), handle.workers_num, handle.worker_id) == (
        size > 1,
        size,
        rank,
    )


def test_the_handle_describes_the_job_until_it_is_closed(ranks: Pool) -> None:
    ranks.run(body_handle)


THREADS = """
import os
import tensorflow as tf
import npu_device as npu
from npu_device._src import compat
from npu_device._src.collectives.job import current
npu.open()
threading = tf.config.threading
print("cores", len(os.sched_getaffinity(0)), "intra", threading.get_intra_op_parallelism_threads(),
      "inter", threading.get_inter_op_parallelism_threads(),
      "spin", not compat.eager_context().config.experimental.disable_thread_spinning,
      "mine", current().cores)
"""
BOUND = """
import os
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[: len(cores) // 2] if os.environ["RANK_ID"] == "0" else cores[len(cores) // 2 :])
"""
BY_SCRIPT = "import tensorflow as tf\ntf.config.threading.set_intra_op_parallelism_threads(3)\n"
_TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("before", "environment", "expected"),
    [
        pytest.param(
            "", {}, "intra {share} inter {inter} spin {spins}", id="the ranks divide the cores"
        ),
        pytest.param(
            BOUND, {}, "mine {cores}", id="ranks bound to cores keep them", marks=_TWO_CORES
        ),
        # TensorFlow reads the variable by itself.
        pytest.param(
            "",
            {"TF_NUM_INTRAOP_THREADS": "3"},
            "intra 0 inter 0 spin True",
            id="of the environment",
        ),
        pytest.param(BY_SCRIPT, {}, "intra 3 inter", id="of the script"),
    ],
)
def test_threads_are_shared_by_the_ranks_of_a_host(
    tmp_path: Path, before: str, environment: dict[str, str], expected: str
) -> None:
    for output in job.outputs(tmp_path, 2, before + THREADS, **environment):
        words = output.split()
        cores = int(words[words.index("cores") + 1])
        share = max(1, cores // 2)
        assert (
            expected.format(cores=cores, share=share, inter=max(2, share), spins=share > 1)
            in output
        )


def test_a_failing_open_names_the_device_and_the_reason(tmp_path: Path) -> None:
    misspelt = {"NPU_DEVICE_AUDT": "off"}
    [result] = job.finish(
        job.start_each(tmp_path, SCRIPT, [{**by_table(tmp_path, 2, 0), **misspelt}])
    )
    assert result.code == 1
    assert "Failed open npu device 0" in result.output
    assert "EI0015" in result.output and "missing" in result.output
    assert "NPU_DEVICE_AUDT: did you mean NPU_DEVICE_AUDIT?" in result.output
    assert "rank 1" in result.output
