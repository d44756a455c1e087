"""Records the steps of one process of ``npurun verify``: of a tensor a few fixed random projections, of a batch a
digest of each row. Knows tensors, no Keras.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.time_limits import RECORDS_SECONDS, SWEEP_SECONDS
from npu_device._src.collectives import job
from npu_device._src.collectives.call import user_line
from npu_device._src.verify.compare import PROJECTIONS, Record, Step, exists, load
from npu_device._src.verify.plan import Process

SCOPE = "npu_verify"
"""The name scope of the operations that record."""

_WIDTH = 1024  # of the matrix that a tensor is for its projections
_FAR_MORE = 10  # times the steps of one optimizer, until an optimizer that rarely steps is no longer waited for
_MANY = 1 << 18  # bytes of a row that count, at the most


class Recorder:
    """The record of this process, which ends with its last step."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.record = Record()
        self.optimizers: dict[str, int] = {}
        """The steps of each optimizer that has been seen."""
        self._next = Step()
        self._lock = threading.RLock()
        atexit.register(self.record.save, process.folder)

    def note(self, kind: str, line: str | None = None, **what: Any) -> None:
        """Keep a call of the script with its line, once."""
        call = {"kind": kind, "line": line or user_line(), **what}
        with self._lock:
            if call not in self.record.calls:
                self.record.calls.append(call)

    def before(self, tensors: Sequence[Any], keep: Callable[..., None]) -> Any:
        """Call a function with the arrays of tensors, now or when the graph runs; None stands for no gradient. Return
        the context of what is to happen after that.
        """

        def call(*arrays: Any) -> np.bool_:
            with self._lock:
                keep(*arrays)
            return np.bool_(True)

        with tf.name_scope(SCOPE):
            dense = [tf.constant(np.nan) if each is None else tf.convert_to_tensor(each) for each in tensors]
            if tf.executing_eagerly():
                call(*(tensor.numpy() for tensor in dense))
                return contextlib.nullcontext()
            done = tf.numpy_function(call, dense, tf.bool)
        return tf.control_dependencies([done])

    def step(self, optimizer: str, names: Sequence[str], gradients: Any, weights: Any) -> None:
        """Keep a step of an optimizer, before its gradients are applied to the first weights; the last step ends the
        process.
        """
        self.record.joined = job.current() is not None
        entered, before = _projected(gradients), _projected(weights)
        self.record.steps.append(
            replace(self._next, optimizer=optimizer, names=names, gradients=entered, weights=before)
        )
        self._next = Step()
        counts, wanted = self.optimizers, self.process.steps
        counts[optimizer] += 1
        if min(counts.values()) >= wanted or counts[optimizer] >= _FAR_MORE * wanted:
            self.record.save(self.process.folder)
            self._wait_for_others()
            sys.stdout.flush()
            os._exit(0)

    def reduced(self, line: str, *arrays: np.ndarray) -> None:
        """Keep what was given to a reduction."""
        self._next.reduced.append((line, _projected(arrays)))

    def own(self, *arrays: np.ndarray) -> None:
        """Keep gradients that a tape has given."""
        known = self._next.own
        known[len(arrays)] = known.get(len(arrays), 0) + _projected(arrays)

    def rows(self, inputs: Any, counted: Any) -> Any:
        """Keep the digests of the first rows of nested tensors, or of all; return as ``before`` does."""
        leaves = [leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf for leaf in tf.nest.flatten(inputs)]
        leaves = [leaf for leaf in leaves if isinstance(leaf, (tf.Tensor, np.ndarray))]
        count = tf.constant(-1) if counted is None else tf.cast(counted, tf.int32)
        return self.before([count, *leaves], lambda *arrays: self._next.rows.update(_digests(*arrays)))

    def logs(self, values: dict[str, float]) -> None:
        """Keep what the script sees of the last step: losses and metrics."""
        if self.record.steps:
            self.record.steps[-1].logs.update(values)

    def other_seed(self, number: int) -> int | None:
        """Return the seed that the single process gave to its shuffle of the same number; it has run before."""
        shuffles = load(replace(self.process, run="one", ranks=1, rank=0).folder).of("shuffle")
        return next((call["seed"] for call in shuffles if call["number"] == number), None)

    def _wait_for_others(self) -> None:
        """Wait until all ranks have come as far: a rank that ends would be missed by those that are a step behind."""
        deadline = time.monotonic() + RECORDS_SECONDS
        others = [replace(self.process, rank=rank).folder for rank in range(self.process.ranks)]
        while not all(map(exists, others)) and time.monotonic() < deadline:
            time.sleep(SWEEP_SECONDS)


def _projected(arrays: Sequence[Any]) -> np.ndarray:
    """Return the projections of each array; NaN for one that is NaN."""
    found = [_projection(np.asarray(array, np.float64).ravel(), place) for place, array in enumerate(arrays)]
    return np.array(found).reshape(-1, PROJECTIONS)


def _projection(flat: np.ndarray, place: int) -> np.ndarray:
    numbers = np.random.default_rng([place, flat.size])
    width = min(flat.size, _WIDTH) or 1
    whole = np.pad(flat, (0, -flat.size % width)).reshape(-1, width)
    left, right = numbers.standard_normal((PROJECTIONS, len(whole))), numbers.standard_normal((PROJECTIONS, width))
    return np.asarray(((left @ whole) * right).sum(axis=1))


def _digests(count: np.ndarray, *leaves: np.ndarray) -> list[int]:
    """Return a number for each row of the arrays that have as many rows as the first."""
    arrays = [leaf for leaf in leaves if leaf.ndim]
    found = [0] * (len(arrays[0]) if arrays else 0)
    for array in arrays:
        for place, row in enumerate(array if len(array) == len(found) else ()):
            words = array.dtype == object  # or a single one
            data = repr(np.array(row, object).tolist()).encode() if words else np.ascontiguousarray(row).tobytes()
            found[place] = zlib.crc32(data[:_MANY], found[place])
    return found[: None if count < 0 else int(count)]
