"""A choice that only the running graph can make: to carry data in messages, or to move them as usual."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.collectives.backends.arrays.operations import ComparingBackend
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.terms import Agreement


class EitherBackend:
    """Two backends for one call of a graph, in the branches of a condition.

    Args:
        carrying: moves small data with the comparison of the call.
        usual: moves data after the comparison.
        is_small: which of them runs: bool, shape [].
    """

    def __init__(self, carrying: ComparingBackend, usual: Any, is_small: tf.Tensor) -> None:
        self._carrying, self._usual, self._is_small = carrying, usual, is_small

    def start_all_reduce(
        self,
        agreement: Agreement,
        segments: Sequence[Sequence[tf.Tensor]],
        reduction: str,
        group: Group,
        wire: tf.DType | None,
    ) -> list[Callable[[], list[tf.Tensor]]]:
        """Reduce segments, as ``contract`` says."""

        def reduce(backend: Any, agreement: Agreement) -> list[list[tf.Tensor]]:
            return [finish() for finish in backend.start_all_reduce(agreement, segments, reduction, group, wire)]

        results = self._either(agreement, group, reduce)
        return [partial(list, result) for result in results]

    def reduce(
        self, agreement: Agreement, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        """Reduce tensors to one rank, as ``contract`` says."""
        return list(
            self._either(agreement, group, lambda backend, now: backend.reduce(now, tensors, reduction, root, group))
        )

    def broadcast(self, agreement: Agreement, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
        """Return the root's tensors on every rank."""
        return list(self._either(agreement, group, lambda backend, now: backend.broadcast(now, tensors, root, group)))

    def all_gather(self, agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
        """Return all ranks' rows on every rank."""
        return self._either(agreement, group, lambda backend, now: backend.all_gather(now, row, group))

    def all_to_all(self, agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i."""
        return self._either(agreement, group, lambda backend, now: backend.all_to_all(now, rows, group))

    def _either(self, agreement: Agreement, group: Group, move: Callable[[Any, Agreement], Any]) -> Any:
        runtime, terms = agreement.runtime, agreement.take()

        def carried() -> Any:
            return move(self._carrying, Agreement(runtime, *terms))

        def usual() -> Any:
            with tf.control_dependencies(self._carrying.exchange_terms(Agreement(runtime, *terms), group)):
                return move(self._usual, Agreement(runtime))

        return tf.cond(self._is_small, carried, usual)
