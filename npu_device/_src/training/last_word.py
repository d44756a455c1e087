"""The last word, at the end of a job: are the variables that were made equal on all ranks still equal?

No rank waits for another: each posts its checksums when it leaves, and the last one compares. Trainable variables and
the state of optimizers that differ are a warning. Others, such as the moving statistics of batch normalisation in
loops of one's own, are listed as information.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.time_limits import LAST_WORD_SECONDS
from npu_device._src.collectives.job import Job
from npu_device._src.training.digests import checksum, differences, variable_name
from npu_device._src.training.schedule import can_compare

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


class _Noted(NamedTuple):
    """A variable, what the ranks call it, and its name."""

    key: str
    reference: weakref.ref[Any]
    name: str


class LastWord:
    """The variables that all ranks of a job have made equal; a part of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._noted: dict[int, _Noted] = {}  # by the variable's id
        self._optimizers: dict[str, list[weakref.ref[Any]]] = {}  # each with what it trains, by the key of the first
        self._calls = 0

    def add(self, variables: Sequence[Any]) -> None:
        """Note variables that are equal on all ranks of the job from now on. Every rank does it, in the same order."""
        inner = list(map(compat.inner_variable, variables))  # a function knows Keras's variables by those inside
        new = [place for place, variable in enumerate(inner) if id(variable) not in self._noted]
        if not new or not can_compare():
            return
        self._calls += 1
        noted = self._noted
        for place in new:
            number = id(inner[place])
            reference = weakref.ref(inner[place], lambda _, number=number: noted.pop(number, None))  # type: ignore[misc]
            noted[number] = _Noted(f"{self._calls}/{place}", reference, variable_name(variables[place]))

    def knows(self, number: int) -> bool:
        """Return whether the variable of an id was equal on all ranks."""
        return number in self._noted

    def add_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Note that an optimizer trains variables with reduced gradients: its state is equal on all ranks, too."""
        first = self._noted.get(id(compat.inner_variable(variables[0]))) if variables else None
        if first is not None:
            self._optimizers.setdefault(first.key, [weakref.ref(one) for one in (optimizer, *variables)])

    def close(self) -> None:
        """Compare; after a failure nothing is compared."""
        job = self._job
        if job.health.is_over:
            return
        with compat.eager_mode(), contextlib.suppress(ClusterError, tf.errors.OpError):
            present = self._present()
            mine = dict(_checksums(present))
            said = {"alone": not job.has_communicated, "checksums": mine}
            everybody = job.store.post("the last word", said)
            if len(everybody) == job.cluster.world_size:
                self._say(present, [everybody[rank] for rank in range(job.cluster.world_size)])

    def _present(self) -> list[tuple[str, Any, str, bool]]:
        """Return the variables that exist, each with its key, its name and whether it must be equal; those first."""
        noted = list(self._noted.values())
        found = {one.key: (variable, one.name) for one in noted if (variable := one.reference()) is not None}
        state: dict[str, tuple[Any, str]] = {}
        for key, references in self._optimizers.items():
            optimizer, *trained = [reference() for reference in references]
            if optimizer is not None and all(variable is not None for variable in trained):
                own = map(compat.inner_variable, compat.optimizer_variables(optimizer, trained))
                state.update({f"{key}/{place}": (one, variable_name(one)) for place, one in enumerate(own)})
        of_optimizers = {id(variable) for variable, _ in state.values()}
        found.update({key: one for key, one in state.items() if id(one[0]) not in self._noted})
        present = [
            (key, variable, name, bool(variable.trainable) or id(variable) in of_optimizers)
            for key, (variable, name) in found.items()
            if hasattr(variable, "trainable")
        ]
        return sorted(present, key=lambda one: not one[3])

    def _say(self, present: list[tuple[str, Any, str, bool]], everybody: list[dict[str, Any]]) -> None:
        cluster = self._job.cluster
        if all(one["alone"] for one in everybody):
            _log.warning(_ALONE, cluster.world_size)
            return
        checksums = [one["checksums"] for one in everybody]
        for level, wanted in ((logging.WARNING, True), (logging.INFO, False)):
            # What nobody refers to any more may be gone on some ranks only.
            names = {
                key: name for key, _, name, must in present if must is wanted and all(key in mine for mine in checksums)
            }
            rows = [[mine[key] for key in names] for mine in checksums]
            found = differences(cluster, range(cluster.world_size), list(names.values()), rows)
            if found is not None:
                _log.log(level, ENDED_APART, found[1])


def _checksums(present: Iterable[tuple[str, Any, str, bool]]) -> Iterator[tuple[str, int]]:
    """Return the keys and checksums of as many variables as there is time for."""
    until = time.monotonic() + LAST_WORD_SECONDS
    for key, variable, _, _ in present:
        if time.monotonic() > until:
            return
        with contextlib.suppress(tf.errors.OpError, NotImplementedError, ValueError):  # without a value, or a graph's
            yield key, _checksum(compat.to_array(tf.convert_to_tensor(variable)))


def _checksum(array: np.ndarray) -> int:
    """Return the checksum of an array; of a large one, of some pieces."""
    if array.nbytes <= _PIECE * _PIECES or array.dtype == object:
        return checksum(array)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = 0
    for begin in np.linspace(0, len(data) - _PIECE, _PIECES).astype(int):
        found = checksum(data[begin : begin + _PIECE], found)
    return found
