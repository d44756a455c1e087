"""A choice that only the running graph can make: to carry data in messages, or to move them as usual."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.collectives.backends.arrays.operations import ComparingBackend
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.terms import Agreement


class EitherBackend:
    """Two backends for a group's call in a graph, in the branches of a condition. For the methods see ``contract``.

    Args:
        carrying: moves small data with the comparison of the call.
        usual: moves data after the comparison.
        is_small: which of them runs: bool, shape [].
        group: the group.
    """

    def __init__(self, carrying: ComparingBackend, usual: Any, is_small: tf.Tensor, group: Group) -> None:
        self._carrying, self._usual, self._is_small, self._group = carrying, usual, is_small, group

    def start_all_reduce(self, agreement: Agreement, *args: Any) -> list[Callable[[], list[tf.Tensor]]]:
        """Reduce segments."""

        def reduce(backend: Any, now: Agreement) -> list[list[tf.Tensor]]:
            return [finish() for finish in backend.start_all_reduce(now, *args)]

        return [partial(list, results) for results in self._either(agreement, reduce)]

    def reduce(self, agreement: Agreement, *args: Any) -> list[tf.Tensor]:
        """Reduce tensors to one rank."""
        return list(self._either(agreement, lambda backend, now: backend.reduce(now, *args)))

    def broadcast(self, agreement: Agreement, *args: Any) -> list[tf.Tensor]:
        """Return the root's tensors on every rank."""
        return list(self._either(agreement, lambda backend, now: backend.broadcast(now, *args)))

    def all_gather(self, agreement: Agreement, *args: Any) -> tf.Tensor:
        """Return all ranks' rows on every rank."""
        return self._either(agreement, lambda backend, now: backend.all_gather(now, *args))

    def all_to_all(self, agreement: Agreement, *args: Any) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i."""
        return self._either(agreement, lambda backend, now: backend.all_to_all(now, *args))

    def _either(self, agreement: Agreement, move: Callable[[Any, Agreement], Any]) -> Any:
        runtime, terms = agreement.runtime, agreement.take()

        def carried() -> Any:
            return move(self._carrying, Agreement(runtime, *terms))

        def usual() -> Any:
            with tf.control_dependencies(self._carrying.exchange_terms(Agreement(runtime, *terms), self._group)):
                return move(self._usual, Agreement(runtime))

        return tf.cond(self._is_small, carried, usual)
