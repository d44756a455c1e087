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
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.job import Job
from npu_device._src.training.digests import checksum, differences, variable_name
from npu_device._src.training.schedule import can_compare

_log = logging.getLogger("npu_device")

_SECONDS = 0.7  # of the second that this may take; what is left after that isn't compared
_PIECE = 1 << 20  # bytes
_PIECES = 32  # of a large variable, from its beginning to its end

_ALONE = (
    "nothing was reduced, broadcast or gathered in this job of %d ranks: each of them ran by itself. If they trained, "
    "each has trained a model of its own.\nLikely cause: a script for a single device, started with several ranks.\n"
    "What to do: call model = npu.distribute.replicate(model) before fit; npu.distribute.all_reduce(gradients) in the "
    "training loop; or wrap the optimizer: npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer), and "
    "NPUDistributedOptimizer in a session. Start a single rank where they have nothing to do with each other."
)
_APART = (
    "the ranks ended with different values for %s\nLikely cause: the script changes variables on some ranks only, or "
    "applies gradients that weren't reduced.\nWhat to do: change them on every rank alike."
)


class LastWord:
    """The variables that all ranks of a job have made equal; a part of the job.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._keys: dict[int, str] = {}  # by the variable's id
        self._variables: dict[str, weakref.ref[Any]] = {}
        self._names: dict[str, str] = {}
        self._optimizers: dict[str, list[weakref.ref[Any]]] = {}  # each with what it trains, by the key of the first
        self._calls = 0

    def add(self, variables: Sequence[Any]) -> None:
        """Note variables that are equal on all ranks of the job from now on. Every rank does it, in the same order."""
        inner = list(map(compat.inner_variable, variables))  # a function knows Keras's variables by those inside
        new = [place for place, variable in enumerate(inner) if id(variable) not in self._keys]
        if not new or not can_compare():
            return
        self._calls += 1
        for place in new:
            self._add(f"{self._calls}/{place}", inner[place], variable_name(variables[place]))

    def _add(self, key: str, variable: Any, name: str) -> None:
        number, keys, found, names = id(variable), self._keys, self._variables, self._names

        def forget(_: Any) -> None:
            keys.pop(number, None)
            found.pop(key, None)
            names.pop(key, None)

        found[key], keys[number], names[key] = weakref.ref(variable, forget), key, name

    def add_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Note that an optimizer trains variables with reduced gradients: its state is equal on all ranks, too."""
        key = self._keys.get(id(compat.inner_variable(variables[0]))) if variables else None
        if key is not None:
            self._optimizers.setdefault(key, [weakref.ref(one) for one in (optimizer, *variables)])

    def close(self) -> None:
        """Compare; after a failure nothing is compared."""
        job = self._job
        if job.health.is_over:
            return
        with compat.eager_mode(), contextlib.suppress(ClusterError, tf.errors.OpError):
            present = self._present()
            mine = dict(_checksums((key, variable) for key, (variable, _) in present.items()))
            said = {"alone": not job.has_communicated, "checksums": mine}
            everybody = job.store.post("the last word", said)
            if len(everybody) == job.cluster.world_size:
                self._say(present, [everybody[rank] for rank in range(job.cluster.world_size)])

    def _present(self) -> dict[str, tuple[Any, bool]]:
        """Return the variables that exist, by key, each with whether it must be equal; those that must come first."""
        variables, optimizers = list(self._variables.items()), list(self._optimizers.items())
        alive = {key: variable for key, reference in variables if (variable := reference()) is not None}
        state: dict[str, Any] = {}
        for key, references in optimizers:
            optimizer, *trained = [reference() for reference in references]
            if optimizer is not None and all(variable is not None for variable in trained):
                own = compat.optimizer_variables(optimizer, trained)
                state.update({f"{key}/{place}": compat.inner_variable(variable) for place, variable in enumerate(own)})
        of_optimizers = {id(variable) for variable in state.values()}
        found = {**alive, **{key: variable for key, variable in state.items() if id(variable) not in self._keys}}
        must = {
            key: bool(variable.trainable) or id(variable) in of_optimizers
            for key, variable in found.items()
            if hasattr(variable, "trainable")
        }
        return {key: (found[key], must[key]) for key in sorted(must, key=lambda key: not must[key])}

    def _say(self, present: dict[str, tuple[Any, bool]], everybody: list[dict[str, Any]]) -> None:
        cluster = self._job.cluster
        if all(one["alone"] for one in everybody):
            _log.warning(_ALONE, cluster.world_size)
            return
        checksums = [one["checksums"] for one in everybody]
        # What nobody refers to any more may be gone on some ranks only.
        common = [key for key in checksums[0] if all(key in mine for mine in checksums) and key in present]
        for level, must in ((logging.WARNING, True), (logging.INFO, False)):
            keys = [key for key in common if present[key][1] is must]
            names = [self._names.get(key) or variable_name(present[key][0]) for key in keys]
            rows = [[mine[key] for key in keys] for mine in checksums]
            found = differences(cluster, range(cluster.world_size), names, rows)
            if found is not None:
                _log.log(level, _APART, found[1])


def _checksums(variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, int]]:
    """Return the keys and checksums of as many variables as there is time for."""
    until = time.monotonic() + _SECONDS
    for key, variable in variables:
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
