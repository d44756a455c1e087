"""Many fits in one job: nothing of a dropped model stays. ``benchmarks/fits.py`` measures fifty fits."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import tensorflow as tf
from fit_models import compile_model, make_model, samples
from pool import Pool

import npu_device as npu
from npu_device._src.compat.live_objects import live_objects

_OBJECTS_PER_FIT = 100  # a graph that stays has more than a thousand


def body_fits(warm: int, counted: int) -> Any:
    """Return what later fits leave: models, threads, groups, and objects that Python knows."""
    from npu_device._src.collectives import job

    npu.open()
    x, y = samples()
    models = []

    def left() -> tuple[int, int, int]:
        gc.collect()
        groups = len(job.current().groups)
        return len(os.listdir("/proc/self/task")), groups, len(gc.get_objects())

    for number in range(warm + counted):
        if number == warm:
            before = left()
        model = make_model("functional")
        compile_model(model, "adam")
        npu.distribute.replicate(model)
        model.fit(x, y, batch_size=32, verbose=0)
        models.append(weakref.ref(model))
        del model
    after = left()
    return [later - earlier for earlier, later in zip(before, after)], [one() for one in models]


@pytest.mark.once
def test_dropped_models_and_their_graphs_are_freed(keras_two_ranks: Pool) -> None:
    for (threads, groups, objects), models in keras_two_ranks.run(body_fits, 2, 1):
        assert models == [None] * 3
        assert threads <= 0 and groups == 0
        assert objects < _OBJECTS_PER_FIT


def body_search() -> int:
    live_objects([tf.Graph])
    return gc.get_freeze_count()


def test_garbage_collections_of_ranks_leave_modules_out_after_a_search(two_ranks: Pool) -> None:
    assert all(frozen > 100_000 for frozen in two_ranks.run(body_search))
