"""Ranks of one host talk through shared memory: chosen by itself, only when it is proved, and left behind by nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from pool import Pool
from ranks import table_environment

import npu_device as npu
from hccl.split.api import set_split_strategy_by_idx
from npu_device._src.collectives.engines.host import sharing
from npu_device._src.gradients import split_strategy

pytestmark = pytest.mark.skipif(
    not sharing.is_supported() or os.environ.get("NPU_DEVICE_BACKEND") == "tensorflow",
    reason="needs Linux on x86-64, and isn't about TensorFlow's backend",
)

BEGIN = """
import os, sys, time
import tensorflow as tf
import npu_device as npu
rank = npu.open().worker_id
def shared():
    from npu_device._src.collectives import group, operation as backend
    from npu_device._src.training import device
    job = device.running_job()
    return backend.backend_name(job, group.group_of(job, "hccl_world_group"), [tf.float32]) == "shared_memory"
"""


def body_kept() -> Any:
    rank = npu.open().worker_id
    reduce = tf.function(lambda x: npu.distribute.all_reduce([x, 2 * x], "sum"))
    kept, expected, variable = [], [], tf.Variable(tf.zeros([50_000]))
    for number in range(12):
        x = tf.fill([50_000], float(number + rank))
        results = [*reduce(x), npu.distribute.all_reduce(x, "sum"), *npu.distribute.all_reduce([x, x], "mean")]
        variable.assign(results[0])
        results += [tf.reshape(results[1], [500, 100])[7:9], variable.read_value()]
        # Some are dropped, so that their memory is used again.
        kept += results[number % 3 :: 2]
        expected += [np.array(result) for result in results[number % 3 :: 2]]
        results[0] += 1.0
    return [bool((np.array(tensor) == array).all()) for tensor, array in zip(kept, expected)]


def test_a_tensor_that_is_kept_never_changes(several_ranks: Pool) -> None:
    for same in several_ranks.run(body_kept):
        assert len(same) > 30 and all(same)


def body_strategies() -> Any:
    rank = npu.open().worker_id
    tensors = [tf.random.stateless_normal([1000 * (i + 1)], [rank, i]) for i in range(8)]
    found = []
    for ends in ([7], [0, 7], [2, 5, 7], list(range(8))):
        set_split_strategy_by_idx(ends)
        try:
            results = tf.function(lambda: npu.distribute.all_reduce(tensors, "mean"))()
        finally:
            split_strategy._strategies.clear()
        found.append(b"".join(result.numpy().tobytes() for result in results))
    return found


def test_every_split_gives_the_same_bits_on_every_rank(several_ranks: Pool) -> None:
    results = several_ranks.run(body_strategies)
    assert len({digest for found in results for digest in found}) == 1


def test_a_backend_that_differs_or_is_unknown_is_an_error(tmp_path: Path) -> None:
    environments = [
        {**table_environment(tmp_path, 2, rank), "NPU_DEVICE_BACKEND": backend}
        for rank, backend in enumerate(["tensorflow", "auto"])
    ]
    for result in job.finish(job.start_each(tmp_path, BEGIN, environments)):
        assert result.code != 0
        assert "another setting, NPU_DEVICE_BACKEND default (the chief: tensorflow)" in result.output
    [result] = job.run(tmp_path, 1, BEGIN, RANK_SIZE="2", RANK_ID="0", NPU_DEVICE_BACKEND="gloo")
    assert result.code != 0


APART = """
import json, os, sys
import tensorflow
for use, environment in json.loads(sys.argv[1]).items():
    if not os.fork():
        os.environ.update(environment, NPU_DEVICE_SHARED_MEMORY=use)
        exec(compile(open(sys.argv[2]).read(), sys.argv[2], "exec"), {"__name__": "__main__"})
        sys.exit()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print("end of", use, code, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root to make a PID namespace")
def test_ranks_that_cannot_share_use_an_engine_with_one_warning(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEGIN + 'print("shared", shared(), float(npu.distribute.all_reduce(tf.constant(1.0), "sum")))\n')
    apart = tmp_path / "apart.py"
    apart.write_text(APART)
    commands = []
    tables = {use: tmp_path / use for use in ("on", "required")}
    for directory in tables.values():
        directory.mkdir()
    for rank, prefix in enumerate([[], ["unshare", "--pid", "--fork", "--mount-proc"]]):
        uses = {use: table_environment(directory, 2, rank) for use, directory in tables.items()}
        commands.append([*prefix, sys.executable, str(apart), json.dumps(uses), str(script)])
    allowed, required = zip(*(result.output.split("end of on 0\n") for result in job.run_anew(commands, [{}, {}])))
    assert all("shared False 2.0" in output for output in allowed), allowed
    assert sum(output.count("use the slower engine between hosts") for output in allowed) == 1
    for output in required:
        assert "end of required 1" in output
        assert "rank 1 on host" in output and "PID namespace" in output
        assert "What to do" in output


def test_only_the_same_user_can_open_the_memory() -> None:
    offer = sharing.Offer(sharing.PAGE)
    path = offer.path
    with offer.memory as memory:
        assert os.stat(path).st_mode & 0o077 == 0
        with sharing.attach(path, sharing.PAGE, offer.token) as other:
            other[:4] = b"same"
            assert memory[:4] == b"same"
        if os.geteuid() == 0:
            code = f"import os; os.setgid(65534); os.setuid(65534); os.open({path!r}, os.O_RDWR)"
            result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert "PermissionError" in result.stderr
    os.close(int(Path(path).name))
