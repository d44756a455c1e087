"""``npu.open(seed=...)``: the random states that ``keras.utils.set_random_seed`` sets, on one process and on ranks."""

from __future__ import annotations

from pathlib import Path

import job
import pytest

FIT = """
import os, random, sys
import numpy as np
import tensorflow as tf
import npu_device as npu
from npu_device._src import compat

def drawn():
    states = random.random(), np.random.random(), compat.random_state()
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 3))
    assert not tf.executing_eagerly() or float(tf.random.uniform([])) >= 0
    return states, layer.get_weights()[0].tolist(), tf.random.normal([2]).numpy().tolist()

handle = npu.open(seed=5)
assert not compat.context_is_initialized() or handle.workers_num > 1
mine = drawn()
assert npu.open(seed=np.int64(5)) is npu.open() is handle
assert drawn() != mine  # nothing is set again
for wrong, kind in ((6, RuntimeError), (-1, ValueError), (True, ValueError), ("5", ValueError)):
    try:
        npu.open(seed=wrong)
    except kind as error:
        assert f"seed={wrong!r}" in str(error) and "What to do" in str(error), error
    else:
        raise AssertionError(wrong)
tf.keras.utils.set_random_seed(5)
assert drawn() == mine

npu.close() if handle.workers_num == 1 else None
x, y = np.random.random((64, 3)), np.random.random((64, 1))
model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model = npu.distribute.replicate(model)
model.fit(x, y, verbose=0)
print("weights", ["%.5f" % value for value in model.get_weights()[0].ravel()], flush=True)
"""


@pytest.mark.parametrize(("keras", "sizes"), [("3", (1, 2)), ("2", (2,))])
def test_all_states_are_set(keras: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    weights = set()
    for size in sizes:
        for output in job.outputs(tmp_path, size, FIT, timeout=120, keras=keras):
            weights.add(next(line for line in output.splitlines() if line.startswith("weights")))
    assert len(weights) == 1, weights


DIFFERENT = """
import os
import numpy as np
import tensorflow as tf
import npu_device as npu
try:
    npu.open(seed=int(os.environ["RANK_ID"]) or None)
except ValueError as error:
    print(error)
"""


def test_ranks_with_different_seeds_are_named(tmp_path: Path) -> None:
    for result in job.run(tmp_path, 2, DIFFERENT):
        for part in (
            "rank 0 on host",
            "npu.open()\n",
            "rank 1 on host",
            "npu.open(seed=1)",
            "np.random.default_rng",
        ):
            assert part in result.output, result.output
