"""What one process of ``npurun verify`` keeps of its steps: of a tensor its norm and a few fixed random projections, of
a batch a digest of each row. Knows tensors and files, no Keras.
"""

from __future__ import annotations

import json
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

from npu_device._src.collectives import job
from npu_device._src.collectives.call import user_line
from npu_device._src.verify.process_settings import DONE, FACTS, STEPS, Settings

SCOPE = "npu_verify"
"""The name scope of the operations that record."""

_PROJECTIONS = 4
_WIDTH = 1024  # of the matrix that a tensor is for its projections
_FAR_MORE = 10  # times the steps of one optimizer, until an optimizer that rarely steps is no longer waited for
_END_SECONDS = 60.0  # for the other ranks to come as far
_MANY = 1 << 18  # bytes of a row that count, at the most


class Recorder:
    """The record of this process, written as it grows."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {"variables": {}, "calls": []}
        self._file = (settings.folder / STEPS).open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._steps: dict[int | str, int] = {}

    def note(self, kind: str, **what: Any) -> None:
        """Keep a fact about the script with its line, once."""
        fact = {"kind": kind, "line": user_line(), **what}
        with self._lock:
            if fact not in self.facts["calls"]:
                self.facts["calls"].append(fact)

    def step(
        self, optimizer: int, names: Sequence[str], gradients: Sequence[Any], weights: Sequence[Any]
    ) -> tf.Operation | None:
        """Record a step of an optimizer: the gradients that enter, and the weights before they are applied.

        Args:
            optimizer: its number.
            names: of the weights; the first ones are those of the gradients.
            gradients: tensors, or None.
            weights: variables.

        Returns:
            An operation in a graph, which has to run before the update; None in eager mode.
        """
        self.facts["variables"].setdefault(str(optimizer), list(names))
        count = len(gradients)
        return self._record(
            [*gradients, *weights], lambda arrays: self.keep_step(optimizer, arrays[:count], arrays[count:])
        )

    def keep_step(self, optimizer: int | str, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
        """Write a step; end the process, if it is the last one."""
        self.facts["joined"] = job.current() is not None
        self._write("step", optimizer, gradients=_summaries(gradients), weights=_summaries(weights))
        counts = self._steps
        counts[optimizer] = counts.get(optimizer, 0) + 1
        wanted = self.settings.steps
        is_over = min(counts.values()) >= wanted and len(counts) >= len(self.facts["variables"])
        if is_over or max(counts.values()) >= _FAR_MORE * wanted:
            self.finish()
            self._wait_for_others()
            sys.stdout.flush()
            os._exit(0)

    def reduced(self, tensors: Sequence[Any], line: str) -> tf.Operation | None:
        """Record what was given to a reduction."""
        dense = [tensor for tensor in tensors if tensor is None or tf.convert_to_tensor(tensor).dtype.is_floating]
        return self._record(dense, lambda arrays: self._write("reduced", line, values=_summaries(arrays)))

    def rows(self, model: int, inputs: Any, counted: Any) -> None:
        """Record the digests of a batch's rows.

        Args:
            model: number of the model.
            inputs: nested tensors.
            counted: how many of the rows count; None for all.
        """
        leaves = [leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf for leaf in tf.nest.flatten(inputs)]
        leaves = [leaf for leaf in leaves if isinstance(leaf, (tf.Tensor, np.ndarray))]
        if leaves:
            count = tf.constant(-1) if counted is None else tf.cast(counted, tf.int32)
            self._record([count, *leaves], lambda arrays: self._write("rows", model, rows=_digests(*arrays)))

    def logs(self, values: dict[str, float]) -> None:
        """Record what the script sees of the last step: losses and metrics."""
        self._write("logs", 0, values=values)

    def other_seed(self, number: int) -> int | None:
        """Return the seed that the single process gave to its shuffle of the same number; it has run before."""
        path = replace(self.settings, run="one", rank=0).folder / FACTS
        calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
        return next((call["seed"] for call in calls if call["kind"] == "shuffle" and call["number"] == number), None)

    def _record(self, tensors: Sequence[Any], keep: Callable[[Sequence[Any]], None]) -> tf.Operation | None:
        def call(*arrays: Any) -> np.bool_:
            keep(arrays)
            return np.bool_(True)

        with tf.name_scope(SCOPE):
            dense = [tf.constant(np.nan) if each is None else tf.convert_to_tensor(each) for each in tensors]
            if tf.executing_eagerly():
                call(*(tensor.numpy() for tensor in dense))
                return None
            return tf.numpy_function(call, dense, tf.bool).op

    def _write(self, kind: str, which: Any, **what: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"kind": kind, "which": which, **what}) + "\n")
            self._file.flush()

    def finish(self) -> None:
        """Write the facts, and the mark that this process has come to its end."""
        (self.settings.folder / FACTS).write_text(json.dumps(self.facts), encoding="utf-8")
        (self.settings.folder / DONE).touch()

    def _wait_for_others(self) -> None:
        """Wait until all ranks have their marks: a rank that ends would be missed by those that are a step behind."""
        deadline = time.monotonic() + _END_SECONDS
        others = [self.settings.beside(rank) / DONE for rank in range(self.settings.ranks)]
        while not all(other.exists() for other in others) and time.monotonic() < deadline:
            time.sleep(0.02)


def _summaries(arrays: Sequence[Any]) -> list[list[float]]:
    """Return the norm and the projections of each array; NaN for one that is NaN."""
    return [_summary(np.asarray(array, np.float64).ravel(), place) for place, array in enumerate(arrays)]


def _summary(flat: np.ndarray, place: int) -> list[float]:
    numbers = np.random.default_rng([place, flat.size])
    width = min(flat.size, _WIDTH) or 1
    whole = np.pad(flat, (0, -flat.size % width)).reshape(-1, width)
    left, right = numbers.standard_normal((_PROJECTIONS, len(whole))), numbers.standard_normal((_PROJECTIONS, width))
    return [float(np.linalg.norm(flat)), *((left @ whole) * right).sum(axis=1).tolist()]


def _digests(count: np.ndarray, *leaves: np.ndarray) -> list[int]:
    """Return a number for each row of the arrays that have as many rows as the first."""
    arrays = [leaf for leaf in leaves if leaf.ndim]
    arrays = [array for array in arrays if len(array) == len(arrays[0])]
    found = [0] * (len(arrays[0]) if arrays else 0)
    for array in arrays:
        for place, row in enumerate(array):
            data = repr(row.tolist()).encode() if array.dtype == object else np.ascontiguousarray(row).tobytes()[:_MANY]
            found[place] = zlib.crc32(data, found[place])
    return found[: None if count < 0 else int(count)]
