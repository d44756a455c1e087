"""What one process of ``npurun verify`` keeps of its steps: of a tensor its norm and a few fixed random projections, of
a batch a digest of each row. Knows tensors and files, no Keras.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.collectives.call import user_line
from npu_device._src.verify.process_settings import DONE, FACTS, STEPS, Settings

SCOPE = "npu_verify"
"""The name scope of the operations that record."""

_PROJECTIONS = 4
_FAR_MORE = 10  # times the steps of one optimizer, until an optimizer that rarely steps is no longer waited for
_END_SECONDS = 60.0  # for the other ranks to come as far
_DIGEST_SEED = 7
_MANY = 1 << 16  # numbers of a row that count, at the most


class Recorder:
    """The record of this process, written as it grows.

    Args:
        settings: of the run.
        rank: this process's rank.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {"variables": {}, "calls": []}
        self._folder = settings.folder(rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / STEPS).open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._steps: dict[int, int] = {}

    def note(self, kind: str, **what: Any) -> None:
        """Keep a fact about the script with its line, once."""
        fact = {"kind": kind, "line": user_line(), **what}
        with self._lock:
            if fact not in self.facts["calls"]:
                self.facts["calls"].append(fact)

    def step(self, optimizer: int, names: Sequence[str], gradients: Sequence[Any], weights: Sequence[Any]) -> Any:
        """Record a step of an optimizer: the gradients that enter, and the weights before they are applied.

        Returns:
            An operation in a graph, which has to run before the update; None in eager mode.
        """
        self.facts["variables"].setdefault(str(optimizer), list(names))
        return self._record(
            [_summaries(gradients), _summaries(weights)],
            lambda found, weight: self._write("step", optimizer, gradients=found.tolist(), weights=weight.tolist()),
        )

    def reduced(self, tensors: Sequence[Any], line: str) -> Any:
        """Record what was given to an ``all_reduce``."""
        dense = [tensor for tensor in tensors if tensor is not None and tf.convert_to_tensor(tensor).dtype.is_floating]
        return self._record([_summaries(dense)], lambda found: self._write("reduced", line, values=found.tolist()))

    def rows(self, model: int, inputs: Any, counted: Any) -> Any:
        """Record the digests of a batch's rows.

        Args:
            model: number of the model.
            inputs: nested tensors.
            counted: how many of the rows count; None for all.
        """
        with tf.name_scope(SCOPE):
            digest = row_digests(inputs)
        if digest is None:
            return None
        if counted is not None:
            digest = digest[: tf.cast(counted, tf.int32)]
        return self._record([digest], lambda found: self._write("rows", model, rows=found.tolist()))

    def other_seed(self, number: int) -> int | None:
        """Return the seed that the single process gave to its shuffle of the same number; it has run before."""
        path = Path(self.settings.directory, "one", "rank0", FACTS)
        calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
        return next((call["seed"] for call in calls if call["kind"] == "shuffle" and call["number"] == number), None)

    def _record(self, tensors: Sequence[Any], keep: Any) -> Any:
        def call(*arrays: Any) -> np.bool_:
            keep(*map(np.asarray, arrays))
            return np.bool_(True)

        if tf.executing_eagerly():
            call(*(tensor.numpy() for tensor in tensors))
            return None
        return tf.numpy_function(call, tensors, tf.bool).op

    def _write(self, kind: str, which: Any, **what: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"kind": kind, "which": which, **what}) + "\n")
            self._file.flush()
            if kind != "step":
                return
            self._steps[which] = self._steps.get(which, 0) + 1
            wanted, counts = self.settings.steps, self._steps.values()
            over = min(counts) >= wanted and len(counts) >= len(self.facts["variables"])
        if over or max(self._steps.values()) >= _FAR_MORE * wanted:
            self.finish()
            self.wait_for_others()
            sys.stdout.flush()
            os._exit(0)

    def finish(self) -> None:
        """Write the facts, and the mark that this process has come to its end."""
        (self._folder / FACTS).write_text(json.dumps(self.facts), encoding="utf-8")
        (self._folder / DONE).touch()

    def wait_for_others(self) -> None:
        """Wait until all ranks have their marks: a rank that ends would be missed by those that are a step behind."""
        deadline = time.monotonic() + _END_SECONDS
        others = [self.settings.folder(rank) / DONE for rank in range(self.settings.ranks)]
        while not all(map(Path.exists, others)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _summaries(tensors: Sequence[Any]) -> tf.Tensor:
    """Return float64 of shape [number of tensors, 1 + projections]: norm and projections on fixed directions."""
    with tf.name_scope(SCOPE):
        rows = [_summary(tensor, place) for place, tensor in enumerate(tensors)]
        return tf.stack(rows) if rows else tf.zeros([0, 1 + _PROJECTIONS], tf.float64)


def _summary(tensor: Any, place: int) -> tf.Tensor:
    if tensor is None:
        return tf.fill([1 + _PROJECTIONS], tf.constant(np.nan, tf.float64))
    flat = tf.reshape(tf.cast(tf.convert_to_tensor(tensor), tf.float64), [-1])
    directions = tf.random.stateless_normal([_PROJECTIONS, tf.size(flat)], [place, 1])
    projections = tf.linalg.matvec(tf.cast(directions, tf.float64), flat)
    return tf.concat([[tf.norm(flat)], projections], axis=0)


def row_digests(inputs: Any) -> tf.Tensor | None:
    """Return an int64 for each row of the tensors that have as many rows as the first; None without rows."""
    leaves = [leaf for leaf in tf.nest.flatten(inputs, expand_composites=False) if tf.is_tensor(leaf)]
    dense = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.shape.rank not in (None, 0)]
    dense = [leaf for leaf in dense if leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool]
    if not dense:
        return None
    count = tf.shape(dense[0])[0]
    digest = tf.zeros([count], tf.int64)
    for place, leaf in enumerate(dense):
        if place and (leaf.shape[0] is None or leaf.shape[0] != dense[0].shape[0]):
            continue
        flat = tf.reshape(leaf, [count, -1])[:, :_MANY]
        if flat.dtype.is_floating:
            bits = tf.bitcast(tf.cast(flat, tf.float32), tf.int32)
        else:
            bits = tf.cast(flat, tf.int32)
        factors = tf.random.stateless_uniform(
            [tf.shape(bits)[1]], [_DIGEST_SEED, place], minval=1, maxval=(1 << 31) - 1, dtype=tf.int32
        )
        digest = digest * 31 + tf.reduce_sum(tf.cast(bits, tf.int64) * tf.cast(factors, tf.int64), axis=1)
    return digest
