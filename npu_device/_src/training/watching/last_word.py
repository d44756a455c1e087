"""The last word, at the end of a job: are the variables that were made equal on all ranks still equal?

No rank waits for another: each posts its checksums when it leaves, and the last one compares. Trainable variables and
the state of optimizers that differ are a warning. Others, such as the moving statistics of batch normalisation in
loops of one's own, are listed as information.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import LAST_WORD_SECONDS
from npu_device._src.collectives.job import Job
from npu_device._src.gradients.reduction import ReducedTensors
from npu_device._src.training.watching.digests import checksum, differences, variable_name
from npu_device._src.training.watching.own_parts import is_part
from npu_device._src.training.watching.schedule import can_compare

_log = logging.getLogger("npu_device")

_PIECE = 1 << 20  # bytes
_PIECES = 32  # of a large variable, from its beginning to its end

_ALONE = (
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


_Present = tuple[
    str, Any, str, bool
]  # what the ranks call a variable, itself, its name, whether it must be equal


@dataclass
class _Noted:
    key: str  # what the ranks call it
    reference: weakref.ref[Any]
    name: str
    calls: int | None = None  # of reductions before it was made equal; None if it only may be


class LastWord:
    """The variables that all ranks of a job have made equal; a part of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._noted: dict[int, _Noted] = {}  # by id
        self._optimizers: dict[
            str, list[weakref.ref[Any]]
        ] = {}  # each with what it trains, by the key of the first
        self._calls = 0

    def add(self, variables: Sequence[Any], label: str = "") -> None:
        """Note what is equal on all ranks from now on. Every rank does it, in the same order, or has the same label."""
        if not can_compare():
            return
        self._calls, noted = self._calls + (not label), self._noted
        for place, variable in enumerate(variables):
            inner = compat.inner_variable(variable)  # by which a function knows one of Keras
            if id(inner) not in noted:
                forget = functools.partial(noted.pop, id(inner))
                reference = weakref.ref(inner, lambda _, forget=forget: forget(None))  # type: ignore[misc]
                noted[id(inner)] = _Noted(
                    f"{label or self._calls}/{place}", reference, variable_name(variable)
                )
            if not label:
                noted[id(inner)].calls = self._job.made(ReducedTensors).calls

    def add_if_equal(self, variables: Sequence[Any]) -> None:
        """Note variables that may be equal on all ranks now, while a function is traced."""
        with tf.init_scope():
            starts = [_checksum(compat.to_array(tf.convert_to_tensor(each))) for each in variables]
            self.add(variables, f"start {zlib.crc32(repr(starts).encode())}")

    def calls_before(self, number: int) -> int | None:
        """Return how many reductions came before the variable of an id was made equal; None if it never was."""
        return self._noted[number].calls if number in self._noted else None

    def add_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Note that an optimizer trains variables with reduced gradients: its state is equal on all ranks, too."""
        first = self._noted.get(id(compat.inner_variable(variables[0]))) if variables else None
        if first is not None:
            self._optimizers.setdefault(
                first.key, [weakref.ref(one) for one in (optimizer, *variables)]
            )

    def close(self) -> None:
        """Compare; after a failure nothing is compared."""
        job = self._job
        if job.health.is_over:
            return
        with compat.eager_mode(), contextlib.suppress(ClusterError, tf.errors.OpError):
            present, checksums = self._present(), {}
            until = time.monotonic() + LAST_WORD_SECONDS
            for key, variable, _, _ in present:
                # What is without a value, or a graph's, is left out, and what there is no time for.
                with contextlib.suppress(tf.errors.OpError, NotImplementedError, ValueError):
                    if time.monotonic() < until:
                        checksums[key] = _checksum(compat.to_array(tf.convert_to_tensor(variable)))
            mine = {"alone": not job.has_communicated, "checksums": checksums}
            everybody = job.store.post("the last word", mine)
            if len(everybody) == job.cluster.world_size:
                self._say(present, [everybody[rank] for rank in range(job.cluster.world_size)])

    def _present(self) -> list[_Present]:
        """Return the variables that exist, those that must be equal first."""
        noted = list(self._noted.values())
        found = {
            one.key: (variable, one.name)
            for one in noted
            if (variable := one.reference()) is not None
        }
        of_optimizers: set[int] = set()
        for key, references in self._optimizers.items():
            optimizer, *trained = [reference() for reference in references]
            if optimizer is None or any(variable is None for variable in trained):
                continue
            for place, own in enumerate(
                map(compat.inner_variable, compat.optimizer_variables(optimizer, trained))
            ):
                of_optimizers.add(id(own))
                if id(own) not in self._noted:
                    found[f"{key}/{place}"] = own, variable_name(own)
        present = [
            (key, variable, name, bool(variable.trainable) or id(variable) in of_optimizers)
            for key, (variable, name) in found.items()
            if hasattr(variable, "trainable") and not is_part(variable)
        ]
        return sorted(present, key=lambda one: not one[3])

    def _say(self, present: list[_Present], everybody: list[dict[str, Any]]) -> None:
        cluster, checksums = self._job.cluster, [one["checksums"] for one in everybody]
        if all(one["alone"] for one in everybody):
            _log.warning(_ALONE, cluster.world_size)
            return
        # What nobody refers to any more may be gone on some ranks only.
        common = [one for one in present if all(one[0] in mine for mine in checksums)]
        for level, wanted in ((logging.WARNING, True), (logging.INFO, False)):
            names = {key: name for key, _, name, must in common if must is wanted}
            rows = [[mine[key] for key in names] for mine in checksums]
            found = differences(cluster, range(cluster.world_size), list(names.values()), rows)
            if found is not None:
                _log.log(level, ENDED_APART, found[1])


def _checksum(array: np.ndarray) -> int:
    """Return the checksum of an array; of a large one, of some pieces."""
    if array.nbytes <= _PIECE * _PIECES or array.dtype == object:
        return checksum(array)
    data, found = np.ascontiguousarray(array).reshape(-1).view(np.uint8), 0
    for begin in np.linspace(0, len(data) - _PIECE, _PIECES).astype(int):
        found = checksum(data[begin : begin + _PIECE], found)
    return found
