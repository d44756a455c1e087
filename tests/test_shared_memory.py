"""Ranks of one host talk through shared memory: chosen by itself, only when it is proved, and left behind by nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from pool import Pool

import npu_device as npu
from npu_device._src.collectives.engines.host import sharing
from npu_device._src.collectives.engines.host.host_detection import is_supported

pytestmark = pytest.mark.skipif(
    not is_supported() or os.environ.get("NPU_DEVICE_BACKEND") == "tensorflow",
    reason="needs Linux on x86-64, and isn't about TensorFlow's engine",
)


def body_kept() -> Any:
    rank = npu.open().worker_id
    reduce = tf.function(lambda x: npu.distribute.all_reduce([x, 2 * x], "sum"))
    kept, expected, variable = [], [], tf.Variable(tf.zeros([50_000]))
    for number in range(12):
        x = tf.fill([50_000], float(number + rank))
        results = [
            *reduce(x),
            npu.distribute.all_reduce(x, "sum"),
            *npu.distribute.all_reduce([x, x], "mean"),
        ]
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


def body_depth() -> tuple[int, list[str]]:
    """Return how many frames of the package are on the stack at most, and which, in an all-reduce of 4 MiB."""
    npu.open()
    root = os.path.dirname(npu.__file__)
    large = tf.ones([1 << 20])
    for _ in range(3):
        npu.distribute.all_reduce(large, "sum")
    deepest: list[str] = []
    own_frame = sys._getframe()

    def note(frame: Any, event: str, _: Any) -> None:
        names = []
        while event == "call" and frame not in (own_frame, None):
            if frame.f_code.co_filename.startswith(root):
                names.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")
            frame = frame.f_back
        if len(names) > len(deepest):
            deepest[:] = reversed(names)

    sys.setprofile(note)
    npu.distribute.all_reduce(large, "sum")
    sys.setprofile(None)
    return len(deepest), deepest


def test_a_call_is_thirteen_frames_deep_at_most(two_ranks: Pool) -> None:
    for depth, names in two_ranks.run(body_depth):
        assert 8 < depth <= 13, names


APART = """
import ctypes, os, sys
if os.environ["RANK_ID"] == "1":
    assert ctypes.CDLL(None).unshare(0x20000000) == 0  # the next process has a PID namespace of its own
    if process := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os.environ.pop("NPU_DEVICE_RANK_PROCESS", None)  # the rank is this process, not the one that has started it
import tensorflow as tf
import npu_device as npu
from npu_device._src.collectives.engine_text import engine_name
from npu_device._src.collectives.job import current
npu.open()
name = engine_name(current(), current().world_group, [tf.float32])
print("through", name, float(npu.distribute.all_reduce(tf.constant(1.0), "sum")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a PID namespace")
@pytest.mark.parametrize("use", ["on", "required"])
def test_ranks_that_cannot_share_use_an_engine_with_one_warning(tmp_path: Path, use: str) -> None:
    results = job.run(tmp_path, 2, APART, NPU_DEVICE_SHARED_MEMORY=use)
    for result in results:
        if use == "on":
            assert result.code == 0 and "through tensorflow 2.0" in result.output, result.output
        else:
            assert result.code == 1
            assert "rank 1 on host" in result.output and "PID namespace" in result.output
            assert "What to do" in result.output
    assert sum(each.output.count("use the slower engine between hosts") for each in results) == (
        use == "on"
    )


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
            result = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=False
            )
            assert "PermissionError" in result.stderr
    os.close(int(Path(path).name))
