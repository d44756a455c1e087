"""``npu.distribute.shard_and_rebatch_dataset``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from heard import error_of, warnings_of_package
from pool import Pool

import npu_device as npu


def body_shard(global_batch: Any) -> Any:
    dataset = tf.data.Dataset.range(13)
    sharded, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch)
    return (
        [int(element) for element in sharded],
        batch,
        type(batch) is type(global_batch),
        type(batch) is int,
        sharded is dataset,
    )


@pytest.mark.parametrize("kind", ["int", "numpy"])
def test_every_element_once_and_a_share_of_the_batch(ranks: Pool, kind: str) -> None:
    n = ranks.size
    global_batch = 6 if kind == "int" else np.int64(6)
    results = ranks.run(body_shard, global_batch)
    for rank, (elements, batch, same_type, python_int, same) in enumerate(results):
        assert elements == list(range(rank, 13, n))
        assert batch == 6 // n
        assert python_int if n > 1 else same_type
        assert same == (n == 1)


def body_uneven() -> dict[int, tuple[list[str], list[int]]]:
    """Return by number of elements the warnings, and the numbers of batches with and without a smaller one."""
    found = {}
    for elements in range(11, 26):
        with warnings_of_package() as said:
            dataset, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(elements), 6)
            npu.distribute.shard_and_rebatch_dataset(dataset.repeat(), 6)
        lengths = [int(dataset.batch(batch, drop_remainder=drops).cardinality()) for drops in (False, True)]
        found[elements] = said, lengths
    return found


def test_another_number_of_batches_on_some_ranks_is_told(ranks: Pool) -> None:
    results = ranks.run(body_uneven)
    for elements in results[0]:
        differ = any(found[elements][1] != results[0][elements][1] for found in results)
        for rank, (said, _) in enumerate(found[elements] for found in results):
            told = [f"dataset.take({elements // ranks.size * ranks.size})" in text for text in said]
            assert told == ([True] if differ and rank == 0 else []), elements


def body_refusals() -> list[str]:
    divide, dataset = npu.distribute.shard_and_rebatch_dataset, tf.data.Dataset.range(13)
    return [error_of(divide, *given) for given in ((dataset, 7), (dataset, 0), (dataset, 6.0), ([1, 2], 6))]


def test_bad_input_is_refused_with_a_reason(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(body_refusals)):
        if ranks.size == 1:
            assert found == [""] * 4
            continue
        assert [text.partition(":")[0] for text in found] == ["ValueError"] * 2 + ["TypeError"] * 2
        for part in ("divisible by", f"rank {rank}", f"7 on {ranks.size} ranks"):
            assert part in found[0]
