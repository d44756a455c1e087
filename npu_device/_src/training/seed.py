"""The seed of ``npu.open(seed=...)``: one value for Python, numpy, TensorFlow and Keras, the same on every rank."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.collectives.job import Job

_LIMIT = 1 << 32  # numpy takes no larger seed


def checked(seed: Any) -> int:
    """Return a seed as Python's integer."""
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < _LIMIT:
        raise ValueError(
            f"npu.open(seed={seed!r}): expected an integer from 0 to {_LIMIT - 1}.\n"
            "What to do: pass one such number, the same on every rank."
        )
    return number


def require_same(running: Job, seed: int | None) -> None:
    """Compare the seeds that the ranks have passed; every rank of the job makes this call."""
    seeds = running.store.gather("seed", seed, environment.HCCL_CONNECT_TIMEOUT.get())
    if any(each != seeds[0] for each in seeds):
        lines = "\n".join(
            f"  {running.cluster.name_of(rank)}: npu.open({'' if each is None else f'seed={each}'})"
            for rank, each in enumerate(seeds)
        )
        raise ValueError(
            f"the ranks opened with different seeds:\n{lines}\nLikely cause: the seed is computed from the rank or "
            "drawn at random.\nWhat to do: pass the same seed on every rank. Numbers that each rank should draw by "
            "itself come from a generator made of the seed and the rank: np.random.default_rng([seed, rank])."
        )


def set_everywhere(seed: int) -> None:
    """Set the random states of Python, numpy, TensorFlow and each Keras that is imported, without making a context."""
    # A Keras that is imported later takes its seeds from Python's random state.
    kerases = [sys.modules[name].utils for name in ("keras", "tf_keras") if name in sys.modules]
    with contextlib.suppress(ImportError):  # TF_USE_LEGACY_KERAS without tf_keras
        kerases.append(tf.keras.utils)
    for utils in kerases:
        utils.set_random_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)


def random_states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), compat.random_state()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    python, numpy, tensorflow = states
    random.setstate(python)
    np.random.set_state(numpy)
    if compat.random_state() != tensorflow:
        compat.set_random_state(tensorflow)
