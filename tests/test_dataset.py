"""``npu.distribute.shard_and_rebatch_dataset``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from heard import hears
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


@hears
def body_uneven(said: list[str], elements: int, global_batch: int) -> tuple[list[str], list[int]]:
    """Return the warnings, and the numbers of batches with and without a smaller one."""
    dataset = tf.data.Dataset.range(elements)
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch)
    npu.distribute.shard_and_rebatch_dataset(dataset.repeat(), global_batch)
    return said, [len(list(dataset.batch(batch, drop_remainder=drops))) for drops in (False, True)]


@pytest.mark.parametrize("global_batch", [6, 12])
@pytest.mark.parametrize("elements", range(11, 26))
def test_another_number_of_batches_on_some_ranks_is_told(ranks: Pool, elements: int, global_batch: int) -> None:
    results = ranks.run(body_uneven, elements, global_batch)
    differ = any(batches != results[0][1] for _, batches in results)
    for rank, (said, _) in enumerate(results):
        assert [f"dataset.take({elements // ranks.size * ranks.size})" in text for text in said] == (
            [True] if differ and rank == 0 else []
        )


def body_refusals() -> dict[str, str]:
    def refusal(dataset: Any, batch: Any) -> str:
        try:
            npu.distribute.shard_and_rebatch_dataset(dataset, batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    dataset = tf.data.Dataset.range(13)
    return {
        "odd": refusal(dataset, 7),
        "zero": refusal(dataset, 0),
        "float": refusal(dataset, 6.0),
        "list": refusal([1, 2], 6),
    }


def test_bad_input_is_refused_with_a_reason(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(body_refusals)):
        if ranks.size == 1:
            assert set(found.values()) == {"accepted"}
            continue
        assert found["odd"].startswith("ValueError")
        assert (
            "divisible by" in found["odd"]
            and f"rank {rank}" in found["odd"]
            and f"7 on {ranks.size} ranks" in found["odd"]
        )
        assert found["zero"].startswith("ValueError")
        assert found["float"].startswith("TypeError")
        assert found["list"].startswith("TypeError")
