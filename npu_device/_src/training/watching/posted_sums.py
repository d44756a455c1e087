"""Sums of gradients that the ranks post where neither the graph nor the identity of tensors tells if they were reduced.

Whoever finds the sums of all ranks compares them: gradients that are equal on two ranks were reduced, or computed from
the same data. No rank waits for another, and the finding is a warning, which never ends a training.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from npu_device._src.collectives.job import Job
from npu_device._src.training.watching.digests import named
from npu_device._src.training.watching.last_word import LastWord
from npu_device._src.training.watching.schedule import NEVER, next_look
from npu_device._src.training.watching.watched_optimizer import (
    Post,
    Sums,
    WatchedOptimizer,
)

_log = logging.getLogger("npu_device")

SumsByRank = list[list[Sums]]

_MOST_POSTS = 32  # most optimizers of a signature, and most signatures
# Part of the sum of a gradient's absolute values: hosts with other processors round differently.
_ROUNDING_TOLERANCE = 1e-3
_LAST_LOOK = 1000  # the step from which ranks that have posted nothing are not waited for

_NOT_REDUCED = (
    "the ranks apply gradients that were not reduced%s: the optimizer %s has made %d steps, and each of the %d ranks "
    "trains a model of its own.\nLikely cause: the result of all_reduce isn't used (it returns the reduced gradients, "
    "and leaves its arguments as they are); the optimizer isn't wrapped; another model than the replicated one is "
    "trained, such as one loaded or cloned later; or only the loss is reduced, for printing.\nWhat to do: call model = "
    "npu.distribute.replicate(model) before fit, for each model; or in the training loop gradients = "
    "npu.distribute.all_reduce(gradients) before they are applied. If the variables are averaged at longer intervals "
    "(local SGD), average them once before the first step, too: then this isn't said."
)


class PostedSums:
    """The sums that this rank has posted, by signature of their optimizers.

    Args:
        are_equal_otherwise: returns whether what an optimizer trains is kept equal in another way.
    """

    def __init__(
        self, job: Job, last_word: LastWord, are_equal_otherwise: Callable[[WatchedOptimizer], bool]
    ) -> None:
        self._job = job
        self._last_word = last_word
        self._are_equal_otherwise = are_equal_otherwise
        self._posts: dict[str, deque[Post]] = {}

    def compare(
        self,
        watched: WatchedOptimizer,
        step: int,
        arrays: Sequence[np.ndarray],
        unreduced: Sequence[tuple[int, str]] = (),
    ) -> int:
        """Post sums of gradients, or of changes of variables, and look at what all ranks posted in an earlier step.

        ``unreduced`` has ids and names of their variables, if other gradients of the step were reduced. Return the step
        of the next look.
        """
        if watched.is_reduced is not None or self._job.health.is_over or not arrays:
            return NEVER
        earlier = watched.posted
        signature = f"{len(arrays)} gradients of {watched.signature}"
        # Errors are dropped, since the watch must not end a training run; another rank may have told.
        with contextlib.suppress(Exception):
            posts_of_all = self._post(watched, signature, step, _sums(watched, arrays))
            if earlier is None:
                return next_look(step, step)
            sums_by_rank = []
            for posts in posts_of_all:
                # Only sums of the same step can be compared.
                sums_by_rank.append([post[1] for post in posts if post[0] == earlier.step])
            distinct = _distinct(sums_by_rank)
            # A rank that is behind may not have posted yet.
            if distinct:
                self._judge(watched, earlier, distinct)
            if watched.is_reduced is False:
                self._warn(watched, signature, step, unreduced, distinct)
            if watched.is_reduced is None and step < _LAST_LOOK:
                return next_look(step, step)
        return NEVER

    def _post(
        self, watched: WatchedOptimizer, signature: str, step: int, sums: Sums
    ) -> list[list[Post]]:
        """Post the sums of the first step with the sums of earlier optimizers like this one: another rank may be
        behind by one. Return what all ranks have posted.
        """
        posts = self._posts.setdefault(signature, deque(maxlen=_MOST_POSTS))
        # Zeros or infinities are the same on all ranks, and tell nothing.
        tells_something = np.any(sums) and np.all(np.isfinite(sums))
        if watched.posted is None and tells_something:
            watched.posted = Post(step, sums)
            posts.append(watched.posted)
        # Signatures come from shapes, of which a script may make any number.
        if len(self._posts) > _MOST_POSTS:
            del self._posts[next(iter(self._posts))]
        return self._job.control.post(f"gradients: {signature}", list(posts))

    def _judge(self, watched: WatchedOptimizer, earlier: Post, distinct: SumsByRank) -> None:
        """Note whether the gradients were reduced, given for each rank the sums that no other rank has."""
        # If these were reduced, the other ranks have posted theirs by now.
        if earlier.sums not in distinct[self._job.cluster.rank]:
            watched.is_reduced = True
        elif all(distinct) and not self._may_be_averaged_later(watched):
            watched.is_reduced = False

    def _warn(
        self,
        watched: WatchedOptimizer,
        signature: str,
        step: int,
        unreduced: Sequence[tuple[int, str]],
        distinct: SumsByRank,
    ) -> None:
        # Some of the variables may be meant for this rank alone, unless they were equal on all ranks.
        equal_since = [
            self._last_word.reductions_before(variable_id) for variable_id, _ in unreduced
        ]
        if None in equal_since or self._are_equal_otherwise(watched):
            return
        models = min(map(len, distinct))
        # The key can be set once, so that this fails on a second rank, and one of them warns.
        self._job.control.set(f"told about {models} models of {signature}", "")
        names = ""
        if unreduced:
            names = f" for {named([name for _, name in unreduced])}"
        _log.warning(_NOT_REDUCED, names, watched.class_name, step, self._job.cluster.world_size)

    def _may_be_averaged_later(self, watched: WatchedOptimizer) -> bool:
        """Return whether what an optimizer trains may be averaged for the first time much later, as in local SGD: since
        it has been made equal, nothing was reduced. If it never is, ``last_word`` names it.
        """
        reductions = self._job.reductions
        reductions_before = map(self._last_word.reductions_before, watched.trained)
        return reductions == 0 or set(reductions_before) <= {reductions}


def _sums(watched: WatchedOptimizer, arrays: Sequence[np.ndarray]) -> Sums:
    """Return the sums of gradients, or of changes of variables."""
    # Summed in float64, which doesn't lose small numbers among millions.
    changes = [array.astype(np.float64) for array in arrays]
    if watched.values_before:
        changes = [change - start for change, start in zip(changes, watched.values_before)]
    return [[float(change.sum()), float(np.abs(change).sum())] for change in changes]


def _distinct(sums_by_rank: SumsByRank) -> SumsByRank:
    """Return, for each rank, the sums that no other rank has."""
    distinct = []
    for rank, own_sums in enumerate(sums_by_rank):
        sums_of_others = itertools.chain(*sums_by_rank[:rank], *sums_by_rank[rank + 1 :])
        foreign = list(map(np.array, sums_of_others))
        distinct.append([sums for sums in own_sums if not _is_among(np.array(sums), foreign)])
    return distinct


def _is_among(sums: np.ndarray, foreign: list[np.ndarray]) -> bool:
    for other_sums in foreign:
        if other_sums.shape == sums.shape:
            # Relative to the larger sum of absolute values, since sums of both signs cancel.
            tolerance = _ROUNDING_TOLERANCE * np.maximum(sums, other_sums)[:, 1:]
            if np.all(np.abs(sums - other_sums) <= tolerance):
                return True
    return False
