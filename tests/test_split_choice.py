"""``NPU_DEVICE_SPLIT``: numbers from the environment, and splits that were found earlier."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pool import Pool

from npu_device._src.gradients.saved_splits import SavedSplit, fingerprint, place_of, save


def cut_with(choice: str, sizes: list[int]) -> tuple[list[list[int]], list[str]]:
    """The segments of a list of float32 gradients of these lengths, and the warnings about them."""
    import tensorflow as tf

    from npu_device._src.gradients.segments import cut

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npu_device").addHandler(handler)
    os.environ["NPU_DEVICE_SPLIT"] = choice
    try:
        # Eager tensors that were made in the order of the list count from its end.
        return cut([tf.zeros([size]) for size in sizes], "sum", 1, "hccl_world_group"), warnings
    finally:
        del os.environ["NPU_DEVICE_SPLIT"]
        logging.getLogger("npu_device").removeHandler(handler)


def numbers() -> dict[str, Any]:
    from hccl.split.api import set_split_strategy_by_size
    from npu_device._src.gradients import split_strategy

    found = {"fits": cut_with("[1, 3, 5]", [8] * 6), "other": cut_with("1,3,5", [8] * 5), "short": cut_with("1,3", [8])}
    set_split_strategy_by_size([50, 50])
    found["own"] = cut_with("1,3,5", [8] * 6)
    split_strategy.forget()
    return found


def test_numbers_from_the_environment(single: Pool) -> None:
    (found,) = single.run(numbers)
    assert found["fits"] == ([[5, 4], [3, 2], [1, 0]], [])
    segments, (warning,) = found["other"]
    assert sum(map(len, segments)) == 5
    assert segments[0] == [4, 3, 2, 1, 0][: len(segments[0])]
    assert "its last number has to be 4" in warning
    assert found["short"] == ([[0]], [])
    assert found["own"] == ([[5, 4, 3], [2, 1, 0]], [])


def auto(directory: str) -> dict[str, Any]:
    """Only rank 0 sees the directory."""
    from npu_device._src.collectives.job import current
    from npu_device._src.gradients import split_choice

    running = current()
    assert running is not None
    os.environ["NPU_DEVICE_SPLIT_DIR"] = directory if running.cluster.rank == 0 else "/nowhere"
    os.environ["NPU_DEVICE_SPLIT"] = "auto"
    place = place_of(running.cluster.hosts, os.environ.get("NPU_DEVICE_BACKEND", "shared_memory"))
    if running.cluster.rank == 0:
        mine = SavedSplit(fingerprint("float32", [32] * 6), "hccl_world_group", place, (1, 5), True, {})
        elsewhere = replace(mine, model=fingerprint("float32", [32] * 7), place=replace(place, world_size=64))
        other_backend = replace(mine, model=fingerprint("float32", [32] * 8), place=replace(place, backend="mpi"))
        for split in (mine, elsewhere, other_backend):
            save(split)
    try:
        split_choice.send_splits(running)
        return {
            name: cut_with("auto", [8] * count)
            for name, count in (("mine", 6), ("moved", 7), ("other backend", 8), ("changed", 9), ("few", 3))
        }
    finally:
        del os.environ["NPU_DEVICE_SPLIT_DIR"]
        os.environ.pop("NPU_DEVICE_SPLIT", None)


def test_auto_takes_what_was_found_here_for_this_model(two_ranks: Pool, tmp_path: Path) -> None:
    for found in two_ranks.run(auto, str(tmp_path)):
        assert found["mine"] == ([[5, 4], [3, 2, 1, 0]], [])
        segments, (warning,) = found["moved"]
        assert [len(segment) for segment in segments] == [len(segments[0]), 7 - len(segments[0])][: len(segments)]
        assert "world_size 2 (was 64)" in warning
        assert "npurun --tune" in warning
        assert "(was mpi)" in found["other backend"][1][0]
        assert "the model has changed since" in found["changed"][1][0]
        assert found["few"][1] == []
