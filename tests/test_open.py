"""``npu.open`` with real TensorFlow underneath: every scheme of the environment, the handle, and this rank's share of
the host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import job
import pytest
import tensorflow as tf
from pool import Pool
from ranks import free_port
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


@pytest.mark.parametrize("scheme", ["rank table", "CM_*", "TF_CONFIG"])
def test_two_ranks_by_every_scheme(tmp_path: Path, scheme: str) -> None:
    port = free_port()
    environments = {
        "rank table": [by_table(tmp_path, 2, rank) for rank in range(2)],
        "CM_*": [without_table(port, 2, rank) for rank in range(2)],
        "TF_CONFIG": [by_tf_config(port, 2, rank) for rank in range(2)],
    }[scheme]
    patient = [{**environment, "HCCL_CONNECT_TIMEOUT": "60"} for environment in environments]
    results = job.finish(job.start_each(tmp_path, SCRIPT + ANOTHER_JOB, patient))
    for rank, result in enumerate(results):
        assert result.code == 0, result.output
        assert f"rank {rank} of 2 sum 3.0 /job:localhost/replica:0/task:0/device:NPU:" in result.output
        if scheme == "TF_CONFIG":
            assert f"rank 2 of 3, but npu.open() has made it rank {rank} of 2 of another job" in result.output
            assert "spark.python.worker.reuse=false" in result.output
        else:  # these take precedence over TF_CONFIG
            assert "same\n" in result.output


def body_handle() -> Any:
    handle = npu.open()
    same = npu.open() is handle and handle.as_default() is handle and npu.npu_device.global_npu_ctx() is handle
    try:
        npu.open(7)
        other = "opened"
    except RuntimeError as error:
        other = str(error)
    with handle.scope():
        device = tf.constant(1.0).device
    return same, other, device, handle.name(), handle.is_cluster_worker(), handle.workers_num, handle.worker_id


def test_the_handle(ranks: Pool) -> None:
    for rank, result in enumerate(ranks.run(body_handle)):
        same, other, device, name, worker, workers, worker_id = result
        assert same
        assert "device 7 can't be opened" in other and "one process per device" in other
        assert device.endswith("CPU:0")
        assert name == f"/job:localhost/replica:0/task:0/device:NPU:{rank}"
        assert (worker, workers, worker_id) == (ranks.size > 1, ranks.size, rank)


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
      "mine", getattr(current(), "cores", None))
"""
BOUND = """
import os
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[: len(cores) // 2] if os.environ["RANK_ID"] == "0" else cores[len(cores) // 2 :])
"""
BY_SCRIPT = "import tensorflow as tf\ntf.config.threading.set_intra_op_parallelism_threads(3)\n"
ON_ONE_CORE = """
import os
from types import SimpleNamespace
from npu_device._src.collectives.resources import divide_cores
import npu_device as npu
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
npu.open = lambda: divide_cores(SimpleNamespace(cluster=SimpleNamespace(local_size=1), cores=1))
"""
_TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("size", "before", "environment", "expected"),
    [
        pytest.param(2, "", {}, "intra {share} inter {inter} spin {spins}", id="the ranks divide the cores"),
        pytest.param(2, BOUND, {}, "mine {cores}", id="ranks bound to cores keep them", marks=_TWO_CORES),
        pytest.param(1, ON_ONE_CORE, {}, "cores 1 intra 0 inter 2 spin False", id="enough for the order of backward"),
        # TensorFlow reads the variable by itself.
        pytest.param(2, "", {"TF_NUM_INTRAOP_THREADS": "3"}, "intra 0 inter 0 spin True", id="of the environment"),
        pytest.param(2, BY_SCRIPT, {}, "intra 3 inter", id="of the script"),
    ],
)
def test_threads(tmp_path: Path, size: int, before: str, environment: dict[str, str], expected: str) -> None:
    for result in job.run(tmp_path, size, before + THREADS, **environment):
        words = result.output.split()
        cores = int(words[words.index("cores") + 1])
        share = max(1, cores // 2)
        assert expected.format(cores=cores, share=share, inter=max(2, share), spins=share > 1) in result.output


def test_a_failing_open_names_the_device_and_the_reason(tmp_path: Path) -> None:
    misspelt = {"NPU_DEVICE_AUDT": "off"}
    [result] = job.finish(job.start_each(tmp_path, SCRIPT, [{**by_table(tmp_path, 2, 0), **misspelt}]))
    assert result.code == 1
    assert "Failed open npu device 0" in result.output
    assert "EI0015" in result.output and "missing" in result.output
    assert "NPU_DEVICE_AUDT: did you mean NPU_DEVICE_AUDIT?" in result.output
    assert "rank 1" in result.output
