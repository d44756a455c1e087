"""The interface of a backend. The operations need nothing else, so a new engine is one folder with these functions.

The ranks have agreed on a call before a backend gets it, or agree with its first data (``terms``). Everything works
eagerly and in graphs; in a graph a call waits for its own tensors only, and ranks may reach calls of different groups
in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from npu_device._src.collectives.call import Agreement
from npu_device._src.collectives.group import Group


class ReducingBackend(Protocol):
    """The calls that take lists of tensors."""

    def all_reduce(
        self,
        agreement: Agreement,
        segments: Sequence[Sequence[tf.Tensor]],
        reduction: str,
        group: Group,
        wire: tf.DType | None,
    ) -> list[list[tf.Tensor]]:
        """Reduce segments; in a graph each waits only for its own tensors.

        Args:
            agreement: on the call. A backend that compares calls with the data takes its terms.
            segments: lists of tensors of one dtype, of the same shapes on every rank.
            reduction: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``; a mean of integers is floating-point.
            group: the group; a mean is over all ranks that its members stand for (``counts``).
            wire: dtype in which float32 and float64 tensors are sent, or None for their own. Sums are exact to
                float32 either way, and never infinite if the true sum is finite.

        Returns:
            The results of each segment, the same bits on every rank.
        """

    def reduce(
        self, agreement: Agreement, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        """Reduce tensors of one dtype to one rank; the other ranks get values of the result's shapes and dtype."""

    def broadcast(self, agreement: Agreement, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
        """Return the root's tensors on every rank; any dtypes, the same shapes and dtypes everywhere."""


class Backend(ReducingBackend, Protocol):
    """A backend that serves a group on its own."""

    def all_gather(self, agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
        """Return all ranks' rows on every rank: [n] in, [group.size, n] out; n is the same on all ranks."""

    def all_to_all(self, agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out."""
