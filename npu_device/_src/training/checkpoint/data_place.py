"""Follows the iterators from which Keras's ``fit`` takes its batches, and finds the same place in them again."""

from __future__ import annotations

from typing import Any

from npu_device._src import compat
from npu_device._src.training.checkpoint.places import everybody
from npu_device._src.training.fit.batches import pull
from npu_device._src.training.fit.start import digest
from npu_device._src.training.world import World


class DataPlace:
    """The place of one ``fit`` in its data; ``world`` is None on a single device.

    Some data sets get a new iterator in each epoch, others have one for all. The place of an epoch is the number of
    iterators before its own, the batches that earlier epochs took from it, and the checksum of its first batch, by
    which a resumed ``fit`` sees that it reads the same data in the same order.
    """

    def __init__(self, world: World | None, model: Any, knows_length: bool) -> None:
        self._world = world
        self._model = model
        self._knows_length = knows_length
        self._given: Any = None  # by Keras
        self._used: Any = None  # the same one, or after resuming the one at the right place
        self._number = 0
        self._passed = 0
        self._first: list[int] = []  # by rank

    def notes(self) -> dict[str, Any]:
        """Return the place of the epoch's beginning, for JSON."""
        return {"number": self._number, "passed": self._passed, "first": self._first}

    def used(self, given: Any) -> Any:
        """Return the iterator to use for the one that Keras has given."""
        return self._used if given is self._given else given

    def begin_epoch(self, given: Any, count: int, taken: int) -> list[Any]:
        """Return the first ``count`` batches of an epoch; the epoch before has taken ``taken`` ones."""
        if given is self._given:
            self._passed += taken
        else:
            self._number += self._given is not None
            self._passed, self._given, self._used = 0, given, given
        pulled = pull(self._used, count)
        self._first = everybody(self._world, digest(pulled))
        return pulled

    def resume_epoch(self, given: Any, count: int, place: dict[str, Any]) -> tuple[list[Any], str | None]:
        """Return the first batches of an epoch whose place ``notes`` has returned, and why they are others, None if
        they aren't.
        """
        self._number, self._passed, self._first = int(place["number"]), int(place["passed"]), list(place["first"])
        self._given = self._used = given
        dataset, made = compat.dataset_of(given), 0
        if self._number and compat.is_generated(dataset):
            return pull(given, count), _GENERATED
        for wanted in compat.iterators_made(self._model, self._number, self._knows_length):
            while made < wanted:
                self._used, made = iter(dataset), made + 1
            pull(self._used, self._passed)
            pulled = pull(self._used, count)
            found = everybody(self._world, digest(pulled))
            if found == self._first or (len(found) != len(self._first) and set(found) == set(self._first)):
                return pulled, None if self._knows_length else _UNKNOWN_LENGTH
        others = [rank for rank, first in enumerate(found) if rank >= len(self._first) or first != self._first[rank]]
        return pulled, _OTHER_DATA.format(ranks=", ".join(map(str, others)))


_GENERATED = (
    "its data come from Python (a PyDataset, a Sequence, a generator), whose order in a later epoch can't be found "
    "again.\nWhat to do: give fit arrays or a tf.data.Dataset."
)
_UNKNOWN_LENGTH = (
    "the length of the data is unknown, so Keras tries a step after their end, and optimizers count it.\n"
    "What to do: dataset.apply(tf.data.experimental.assert_cardinality(batches))."
)
_OTHER_DATA = (
    "rank(s) {ranks} read a different first batch than before.\nLikely cause: data that are shuffled without a seed or "
    "in Python; or other data.\nWhat to do: call keras.utils.set_random_seed before the data set is made, and shuffle "
    "with tf.data."
)
