"""Ranks whose variables are no longer the same: which ranks and variables these are, and how far they are apart."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.graph import call_now
from npu_device._src.collectives.moves import all_gather
from npu_device._src.collectives.ops import broadcast
from npu_device._src.training.digests import SHOWN_RANKS, SHOWN_VARIABLES, Digest, named
from npu_device._src.training.schedule import NEVER
from npu_device._src.training.world import World

_log = logging.getLogger("npu_device")

_ADVICE = (
    "Likely cause: a rank that changed a variable alone (an assign, a callback, a restored checkpoint); variables that "
    "were made after the broadcast; a loss with another seed or learning rate on each rank, whose gradients were not "
    "reduced; or hosts with different processors, which round differently.\n"
    "What to do: make the change on every rank; broadcast again after it. NPU_DEVICE_AUDIT=1 finds the step, and "
    "NPU_DEVICE_DRIFT=warning goes on after one warning."
)


class Drift:
    """The findings of one optimizer's audits.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._equal_after: int | None = None
        self._after = 0
        self._names: Sequence[str] = ()
        self._values: Sequence[np.ndarray] = ()
        self._digests: Sequence[Digest] = ()
        self._differs = np.zeros([world.size, 0], bool)  # for each rank and variable
        self._different: list[int] = []
        self._mine: list[np.ndarray] = []

    def note(self, names: Sequence[str], values: Sequence[np.ndarray], digests: Sequence[Digest], steps: int) -> None:
        """Note what an audit compares, after so many steps of the optimizer."""
        self._names, self._values, self._digests, self._after = names, values, digests, steps

    def equal(self) -> None:
        """Note that the digests are equal on all ranks."""
        self._equal_after = self._after
        self._values = self._digests = ()

    def report(self, due: Any) -> Any:
        """Raise an error or warn, on every rank alike; a warning returns the largest int64 that is ever due.

        Every rank has to call this. In a graph, it adds the operations that do it.
        """
        job, group = self._world.job, self._world.group
        numbers, amounts = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float64)
        [digests] = call_now(self._all_digests, [due], [numbers])
        [values] = call_now(self._different_values, [all_gather(job, digests, group)], [amounts])
        [roots] = broadcast(job, [values], 0, group)
        [apart] = call_now(self._distances, [roots], [amounts])
        return call_now(self._tell, [all_gather(job, apart, group)], [tf.TensorSpec([], tf.int64)])[0]

    def _all_digests(self, _: Any) -> list[Any]:
        return [np.array([zlib.crc32(repr(digest).encode()) for digest in self._digests], np.int64)]

    def _different_values(self, everybody: Any) -> list[Any]:
        """Return the values of the variables that differ, of as many as are named, in one vector."""
        rows = everybody.reshape(self._world.size, -1)
        self._differs = rows != rows[0]
        self._different = [int(place) for place in np.flatnonzero(self._differs.any(axis=0))]
        self._mine = [self._values[place].astype(np.float64).reshape(-1) for place in self._shown]
        return [np.concatenate([np.zeros([0]), *self._mine])]

    def _distances(self, roots: Any) -> list[Any]:
        ends = np.cumsum([len(value) for value in self._mine])[:-1]
        pairs = zip(self._mine, np.split(roots, ends))
        return [np.array([_distance(mine, root) for mine, root in pairs], np.float64)]

    @property
    def _shown(self) -> list[int]:
        return self._different[:SHOWN_VARIABLES]

    def _tell(self, distances: Any) -> list[Any]:
        text = self._text(distances.reshape(self._world.size, -1))
        self._values, self._digests, self._mine = (), (), []
        if environment.NPU_DEVICE_DRIFT.get() == "error":
            raise RuntimeError(f"rank {self._world.job.cluster.rank}: {text}")
        if self._world.rank == 0:
            _log.warning("%s\nThis optimizer is not audited any more.", text)
        return [np.int64(NEVER)]

    def _text(self, distances: np.ndarray) -> str:
        ranks, cluster = self._world.group.ranks, self._world.job.cluster
        names = [self._names[place] for place in self._different]
        before = "" if self._equal_after is None else f" (after step {self._equal_after} they were equal)"
        far = [place for place in range(len(ranks)) if self._differs[place].any()]
        rows = {ranks[place]: self._row(place, names[:SHOWN_VARIABLES], distances[place]) for place in far}
        return "\n".join(
            [
                f"the ranks have drifted apart: seen after step {self._after}{before}, in {len(names)} of "
                f"{len(self._names)} variables ({named(names)}). They differ from rank {ranks[0]}'s on:",
                *cluster.lines(rows, SHOWN_RANKS),
                _ADVICE,
            ]
        )

    def _row(self, place: int, names: Sequence[str], distances: np.ndarray) -> str:
        """Return the distances of one rank."""
        parts = [
            f"{name} by up to {distance:.3g}" if distance else f"{name} in the sign of zeros or NaN only"
            for name, distance, differs in zip(names, distances, self._differs[place][self._shown])
            if differs
        ]
        return ", ".join(parts or ["other variables"])


def _distance(mine: np.ndarray, root: np.ndarray) -> float:
    """Return the largest difference; NaN if one of the values isn't a number on one side only."""
    differ = ~((mine == root) | (np.isnan(mine) & np.isnan(root)))
    return float(np.abs(mine[differ] - root[differ]).max()) if differ.any() else 0.0
