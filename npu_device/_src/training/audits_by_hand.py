"""The audits of variables whose gradients functions reduce themselves, kept while functions are made anew."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from npu_device._src import compat

if TYPE_CHECKING:
    from npu_device._src.training.replica_audit import Audit


class AuditsByHand:
    """The audits of variables whose gradients functions reduce themselves; a part of the job.

    Functions that are made again go on with the same count. So an audit lives as long as the first of its variables: a
    function that nobody refers to is gone when Python's garbage collector has run, on each rank at another time.
    """

    def __init__(self) -> None:
        self._audits: dict[tuple[int, ...], Audit] = {}

    def of(self, variables: Sequence[Any], make: Callable[[], Audit]) -> Audit:
        """Return the audit of some variables, which is made at first."""
        key = tuple(map(id, variables))
        if key not in self._audits:
            self._audits[key] = make()
            if variables:
                weakref.finalize(variables[0], self._audits.pop, key, None)
        return self._audits[key]

    def are_not_reduced(self, variables: Sequence[Any]) -> None:
        """Note that other gradients than the reduced ones are applied to variables."""
        mine = {id(compat.inner_variable(variable)) for variable in variables}
        for key, audit in self._audits.items():
            if mine.intersection(key):
                audit.is_reduced = False
