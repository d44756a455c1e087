"""The last word, at the end of a job: are the variables that were made equal on all ranks still equal?

No rank waits for another: each posts its checksums when it leaves, and the last rank compares. Trainable variables and
the state of optimizers that differ are a warning. Others, such as the moving statistics of batch normalisation in
loops of one's own, are listed as information.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import LAST_WORD_SECONDS
from npu_device._src.collectives.job import Job
from npu_device._src.training.watching.digests import (
    array_of,
    checksum,
    common_differences,
    variable_name,
)
from npu_device._src.training.watching.partial_sums import is_partial_sum
from npu_device._src.training.watching.schedule import can_compare

_log = logging.getLogger("npu_device")

_PIECE = 1 << 20  # bytes of a piece
_PIECES = 32  # pieces of a large variable, from its beginning to its end

_TRAINED_ALONE = (
    "nothing was reduced, broadcast or gathered in this job of %d ranks: each of them ran by itself. If they trained, "
    "each has trained a model of its own.\nLikely cause: a script for a single device, started with several ranks.\n"
    "What to do: call model = npu.distribute.replicate(model) before fit; npu.distribute.all_reduce(gradients) in the "
    "training loop; or wrap the optimizer: npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer), and "
    "NPUDistributedOptimizer in a session. Start a single rank where they have nothing to do with each other."
)
ENDED_APART = (
    "the ranks ended with different values for %s\nLikely cause: the script changes variables on some ranks only, "
    "applies gradients that weren't reduced, or trains some with an optimizer that isn't an attribute of the model.\n"
    "What to do: change them on every rank alike."
)


# What the ranks call a variable, itself, its name, whether it must be equal.
_Candidate = tuple[str, Any, str, bool]


@dataclass
class _Noted:
    key: str  # the name by which the ranks compare it
    reference: weakref.ref[Any]
    name: str
    # Number of reductions before it was made equal; None if it only may be.
    reductions_before: int | None = None


class LastWord:
    """The variables that all ranks of a job have made equal; a component of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._noted_by_id: dict[int, _Noted] = {}
        # References to each optimizer and to what it trains, by the key of its first variable.
        self._optimizers: dict[str, list[weakref.ref[Any]]] = {}
        self._add_count = 0

    def add(self, variables: Sequence, label: str = "") -> None:
        """Note what is equal on all ranks from now on. Every rank does it, in the same order, or has the same label."""
        if not can_compare():
            return
        noted = self._noted_by_id
        if not label:
            self._add_count += 1
        for position, variable in enumerate(variables):
            # A function knows a variable of Keras by its inner one.
            inner = compat.inner_variable(variable)
            if id(inner) not in noted:
                key = f"{label or self._add_count}/{position}"
                noted[id(inner)] = _Noted(key, weakref.ref(inner), variable_name(variable))
                # A variable that goes takes its note along; ids are used again. At exit, ``close`` needs the notes.
                weakref.finalize(inner, noted.pop, id(inner), None).atexit = False
            if not label:
                noted[id(inner)].reductions_before = self._job.reductions

    def add_if_equal(self, variables: Sequence) -> None:
        """Note variables that may be equal on all ranks now, while a function is traced."""
        with tf.init_scope():
            starts = list(map(checksum_of_pieces, map(array_of, variables)))
            self.add(variables, f"start {zlib.crc32(repr(starts).encode())}")

    def reductions_before(self, variable_id: int) -> int | None:
        """Return how many reductions came before the variable of an id was made equal; None if it never was."""
        noted = self._noted_by_id.get(variable_id)
        if noted is None:
            return None
        return noted.reductions_before

    def add_optimizer(self, optimizer: Any, variables: Sequence) -> None:
        """Note that an optimizer trains variables with reduced gradients: its state is equal on all ranks, too."""
        if not variables:
            return
        noted = self._noted_by_id.get(id(compat.inner_variable(variables[0])))
        if noted is not None:
            references = list(map(weakref.ref, [optimizer, *variables]))
            self._optimizers.setdefault(noted.key, references)

    def close(self) -> None:
        """Compare; after a failure nothing is compared."""
        job = self._job
        if job.health.is_over:
            return
        with compat.eager_mode(), contextlib.suppress(ClusterError, tf.errors.OpError):
            candidates = self._candidates()
            variables = {key: variable for key, variable, _, _ in candidates}
            checksums = checksums_in_time(variables, array_of)
            answer = {"alone": not job.has_communicated, "checksums": checksums}
            answers = job.control.post("the last word", answer)
            # Only the last rank to post gets the answers of all.
            if answers:
                self._compare(candidates, answers)

    def _candidates(self) -> list[_Candidate]:
        """Return the variables that exist, those that must be equal first."""
        variables = {}
        for noted in list(self._noted_by_id.values()):
            variable = noted.reference()
            if variable is not None:
                variables[noted.key] = (variable, noted.name)
        of_optimizers = set()
        for key, references in self._optimizers.items():
            living = [reference() for reference in references]
            if any(component is None for component in living):
                continue
            optimizer, *trained = living
            states = map(compat.inner_variable, compat.optimizer_variables(optimizer, trained))
            for position, state in enumerate(states):
                of_optimizers.add(id(state))
                if id(state) not in self._noted_by_id:
                    variables[f"{key}/{position}"] = (state, variable_name(state))
        candidates = []
        for key, (variable, name) in variables.items():
            if hasattr(variable, "trainable") and not is_partial_sum(variable):
                # Moving statistics aren't trainable, and may differ.
                must_be_equal = bool(variable.trainable) or id(variable) in of_optimizers
                candidates.append((key, variable, name, must_be_equal))
        return sorted(candidates, key=lambda candidate: not candidate[3])

    def _compare(self, candidates: list[_Candidate], answers: list[dict[str, Any]]) -> None:
        cluster = self._job.cluster
        if all(answer["alone"] for answer in answers):
            _log.warning(_TRAINED_ALONE, cluster.world_size)
            return
        checksums = [answer["checksums"] for answer in answers]
        for level, wanted in ((logging.WARNING, True), (logging.INFO, False)):
            names = {}
            for key, _, name, must_be_equal in candidates:
                if must_be_equal is wanted:
                    names[key] = name
            # A variable that nobody refers to any more may be gone on some ranks only.
            text = common_differences(cluster, names, checksums)
            if text:
                _log.log(level, ENDED_APART, text)


def checksums_in_time(
    variables: Mapping[str, Any], read: Callable[[Any], np.ndarray]
) -> dict[str, int]:
    """Return the checksums of variables by what they are called, for as many as there is time."""
    checksums = {}
    # The time is limited, or large models would hold up the end of the job.
    until = time.monotonic() + LAST_WORD_SECONDS
    for key, variable in variables.items():
        # Left out are variables without a value, of a graph, or of a closed session.
        with contextlib.suppress(tf.errors.OpError, RuntimeError, ValueError):
            if time.monotonic() < until:
                checksums[key] = checksum_of_pieces(read(variable))
    return checksums


def checksum_of_pieces(array: np.ndarray) -> int:
    """Return the checksum of an array; of a large one, of some pieces."""
    if array.nbytes <= _PIECE * _PIECES or array.dtype == object:
        return checksum(array)
    # Ranks that have drifted apart differ nearly everywhere, so some pieces suffice.
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    total = 0
    starts = np.linspace(0, len(content) - _PIECE, _PIECES)
    for start in starts.astype(int):
        total = checksum(content[start : start + _PIECE], total)
    return total
