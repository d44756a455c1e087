"""``npu.distribute.shard_and_rebatch_dataset``; custom loops whose ranks train on the same samples, or divide data that
each rank has shuffled differently.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from pool import Pool

import npu_device as npu


def body_shard() -> Any:
    """Return the elements, the batch, and whether nothing has changed, for a batch of each type of integer."""
    dataset = tf.data.Dataset.range(13)
    found = []
    for global_batch in (6, np.int64(6)):
        sharded, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch)
        found.append(
            ([int(element) for element in sharded], batch, type(batch), sharded is dataset)
        )
    return found


def test_every_element_once_and_a_share_of_the_batch(ranks: Pool) -> None:
    n = ranks.size
    for rank, found in enumerate(ranks.run(body_shard)):
        for (elements, batch, kind, same), given in zip(found, (int, np.int64)):
            assert elements == list(range(rank, 13, n))
            assert batch == 6 // n
            assert kind is (int if n > 1 else given)
            assert same == (n == 1)


def body_uneven() -> dict[int, tuple[list[str], list[int]]]:
    """Return by number of elements the warnings, and the numbers of batches with and without a smaller one."""
    found = {}
    for elements in range(11, 19):
        with warnings_of_package() as said:
            dataset, batch = npu.distribute.shard_and_rebatch_dataset(
                tf.data.Dataset.range(elements), 6
            )
            npu.distribute.shard_and_rebatch_dataset(dataset.repeat(), 6)
        lengths = [
            int(dataset.batch(batch, drop_remainder=drops).cardinality()) for drops in (False, True)
        ]
        found[elements] = said, lengths
    return found


def test_another_number_of_batches_on_some_ranks_is_told(ranks: Pool) -> None:
    results = ranks.run(body_uneven)
    for elements in results[0]:
        differ = any(found[elements][1] != results[0][elements][1] for found in results)
        for rank, (said, _) in enumerate(found[elements] for found in results):
            told = [f"dataset.take({elements // ranks.size * ranks.size})" in text for text in said]
            assert told == ([True] if differ and rank == 0 else []), elements


def body_too_few() -> list[str]:
    with warnings_of_package() as said:
        npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(1), 6)
    return said


def test_ranks_without_an_element_are_named(two_ranks: Pool) -> None:
    [told], others = two_ranks.run(body_too_few)
    assert (
        "1 elements on 2 ranks: rank(s) from 1 on get none" in told
        and "files" in told
        and not others
    )


def body_refusals() -> list[str]:
    divide, dataset = npu.distribute.shard_and_rebatch_dataset, tf.data.Dataset.range(13)
    return [
        error_of(divide, *given)
        for given in ((dataset, 7), (dataset, 0), (dataset, 6.0), ([1, 2], 6))
    ]


def test_bad_input_is_refused_with_a_reason(two_ranks: Pool) -> None:
    for rank, found in enumerate(two_ranks.run(body_refusals)):
        assert [text.partition(":")[0] for text in found] == ["ValueError"] * 2 + ["TypeError"] * 2
        for part in ("divisible by", f"rank {rank}", "7 on 2 ranks"):
            assert part in found[0]


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


@pytest.mark.parametrize(
    ("keras", "wrapped", "kind", "call"),
    [("3", True, "sum", "tf.function(step)"), ("2", False, "mean", "step")],
)
def test_ranks_that_read_the_same_samples_are_told_once(
    tmp_path: Path, keras: str, wrapped: bool, kind: str, call: str
) -> None:
    source = LOOP.format(wrapped=wrapped, seed=0, call=call, kind=kind)
    first, second = job.outputs(tmp_path, 2, source, keras=keras)
    assert first.count(SAID) == 1, first
    assert "npu.distribute.shard_and_rebatch_dataset(dataset, global_batch)" in first
    assert ("their sum makes steps 2 times too large" in first) is (kind == "sum")
    assert SAID not in second


def test_ranks_that_read_their_own_are_not(tmp_path: Path) -> None:
    source = LOOP.format(wrapped=False, seed="rank", call="tf.function(step)", kind="mean")
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
    assert "give shuffle a seed, the same on every rank" in before
    quiet, last = after.split("with a seed of each rank\n")
    assert "another order" not in quiet + second.split("with a seed of each rank\n")[0]
    last += second
    assert last.count("shuffled in another order on each rank, with another seed on each rank") == 1
    assert "rank 0 on host node0: seed 7\n  rank 1 on host node0: seed 8\n" in last


IN_ANY_ORDER = """
import npu_device as npu
npu.open({seed}).as_default()
import tensorflow as tf
numbers = tf.data.Dataset.range(16)
options = tf.data.Options()
options.deterministic = False
halves = [tf.data.Dataset.range(8), tf.data.Dataset.range(8, 16)]
for kind, dataset in {{
    "random": tf.data.Dataset.sample_from_datasets(halves, [0.5, 0.5]),
    "inside": numbers.flat_map(lambda number: tf.data.Dataset.range(number, number + 3).shuffle(3)),
    "free": numbers.map(lambda number: number + 1, num_parallel_calls=2, deterministic=False),
    "options": numbers.with_options(options),
    "fixed": numbers.flat_map(lambda number: tf.data.Dataset.range(number, number + 3)),
}}.items():
    print(kind, flush=True)
    npu.distribute.shard_and_rebatch_dataset(dataset, 4)
"""


@pytest.mark.parametrize("seed", ["", "seed=1"])
def test_data_in_another_order_on_each_rank(tmp_path: Path, seed: str) -> None:
    first, second = job.outputs(tmp_path, 2, IN_ANY_ORDER.format(seed=seed))
    _, random, inside, free, options, fixed = re.split("^[a-z]+$", first, flags=re.MULTILINE)
    for said in (random, inside):
        assert ("another order on each rank, without a seed" in said) == (seed == "")
    for said in (free, options):
        assert "may read in another order, since it has deterministic=False" in said
    assert "order" not in fixed + second
