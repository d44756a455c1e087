"""Custom loops whose ranks train on the same samples, or divide data that each rank has shuffled differently."""

from __future__ import annotations

from pathlib import Path

import job
import pytest

LOOP = """
import npu_device as npu
npu.open().as_default()
import numpy as np
import tensorflow as tf
keras = tf.keras
rank = npu.distribute.rank()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input([10]), keras.layers.Dense(10), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.001)
if {wrapped}:
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer, reduce_reduction="{kind}")
x = np.random.default_rng({seed}).standard_normal([96, 10]).astype(np.float32)

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - 1))
    gradients = tape.gradient(loss, model.trainable_variables)
    if not {wrapped}:
        gradients = [1.0 * gradient for gradient in npu.distribute.all_reduce(gradients, "{kind}")]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

call = {call}
for begin in range(0, 96, 8):
    call(x[begin:begin + 8])
"""
SAID = "all ranks have computed the very same gradients"


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "by hand"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_read_the_same_samples_are_told_once(tmp_path: Path, keras: str, wrapped: bool, size: int) -> None:
    kind, call = ("sum", "tf.function(step)") if (size == 2) is wrapped else ("mean", "step")
    source = LOOP.format(wrapped=wrapped, seed=0, call=call, kind=kind)
    first, *others = job.outputs(tmp_path, size, source, keras=keras)
    assert first.count(SAID) == 1, first
    assert "npu.distribute.shard_and_rebatch_dataset(dataset, global_batch)" in first
    assert (f"their sum makes steps {size} times too large" in first) is (kind == "sum")
    assert SAID not in "".join(others)


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "by hand"])
def test_ranks_that_read_their_own_are_not(tmp_path: Path, wrapped: bool) -> None:
    source = LOOP.format(wrapped=wrapped, seed="rank", call="tf.function(step)", kind="mean")
    assert SAID not in "".join(job.outputs(tmp_path, 2, source))


SHUFFLED = """
import npu_device as npu
npu.open().as_default()
import tensorflow as tf
numbers = tf.data.Dataset.range(16).map(lambda number: number + 1)
for kind, dataset in {
    "without a seed": numbers.shuffle(16).map(lambda number: number),
    "with a seed": numbers.shuffle(16, seed=1),
    "not at all": numbers,
    "with a seed of each rank": numbers.shuffle(16, seed=7 + npu.distribute.rank()),
}.items():
    print(kind, flush=True)
    mine, batch = npu.distribute.shard_and_rebatch_dataset(dataset, 4)
    assert len(list(mine.shuffle(16).batch(batch))) == 4
print("the end", flush=True)
"""


def test_data_that_are_shuffled_differently_before_they_are_divided(tmp_path: Path) -> None:
    first, second = job.outputs(tmp_path, 2, SHUFFLED)
    before, after = first.split("with a seed\n")
    assert "shuffled in another order on each rank" in before
    assert "call shuffle after shard_and_rebatch_dataset" in before
    quiet, last = after.split("with a seed of each rank\n")
    assert "another order" not in quiet + second.split("with a seed of each rank\n")[0]
    last += second
    assert last.count("shuffled in another order on each rank, with another seed on each rank") == 1
    assert "rank 0 on host node0: seed 7\n  rank 1 on host node0: seed 8\n" in last
