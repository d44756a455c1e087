"""The place of an epoch in the data of a ``fit``: how it is noted in a checkpoint, and found again."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_device._src import compat
from npu_device._src.training.checkpoint import next_samples
from npu_device._src.training.checkpoint.selection import gather
from npu_device._src.training.fit import start
from npu_device._src.training.fit.sources import PutBack, pull
from npu_device._src.world.share import content
from npu_device._src.world.world import World


@dataclasses.dataclass
class Position:
    """The place of an epoch's first batches in the data of a ``fit``."""

    # Number of iterators that Keras used before the iterator of this epoch.
    iterators_before: int = 0
    # Number of batches that earlier epochs took from the iterator of this epoch.
    passed_batches: int = 0
    # By rank, the checksum of its first batch, which a resumed fit must find again.
    first_checksums: list[int] = dataclasses.field(default_factory=list)
    samples_checksum: int = 0  # checksum of the samples of all ranks in these batches

    @classmethod
    def from_notes(cls, notes: dict[str, Any]) -> Position:
        return cls(*[notes[key] for key in _POSITION_KEYS if key in notes])

    def notes(self) -> dict[str, Any]:
        return dict(zip(_POSITION_KEYS, dataclasses.astuple(self)))


# The names of a position's fields in a checkpoint, as the first releases wrote them.
_POSITION_KEYS = ("number", "passed", "first", "samples")


class FitData:
    """The data of one ``fit``, of which Keras makes an iterator for each epoch or one for all of them."""

    def __init__(self, world: World | None, model: Any, knows_length: bool) -> None:
        self._world = world
        self._model = model
        self._knows_length = knows_length
        self.keras_iterator: Any = None
        # The iterator that is used: Keras's own, or after resuming the one at the right position.
        self.iterator: Any = None
        self.position = Position()

    def begin_epoch(self, keras_iterator: Any, count: int, steps_before: int) -> list:
        """Return the first ``count`` batches of an epoch; the epoch before has taken ``steps_before``."""
        position = self.position
        if keras_iterator is self.keras_iterator:
            position.passed_batches += steps_before
            batches = self.iterator
        else:
            position.iterators_before += self.keras_iterator is not None
            position.passed_batches = 0
            batches = self._take(keras_iterator)
        pulled = pull(batches, count)
        position.first_checksums = gather(self._world, start.full_checksum(pulled[:1]))
        position.samples_checksum = self._samples_checksum(pulled)
        return pulled

    def resume_epoch(
        self, keras_iterator: Any, count: int, position: Position
    ) -> tuple[list, str | None]:
        """Return the first batches of an epoch at the place of a checkpoint, and why they are others; None if not."""
        self.position = position
        batches = self._take(keras_iterator)
        dataset = compat.dataset_of(self.keras_iterator)
        iterators = 0
        if position.iterators_before and compat.is_generated(dataset):
            return pull(batches, count), _GENERATED
        compat.count_passed_batches(position.passed_batches)
        # Keras may have made more iterators than it used; checksums tell which number is right.
        candidates = compat.iterators_made(
            self._model, position.iterators_before, self._knows_length
        )
        for iterators_made in candidates:
            while iterators < iterators_made:
                self.iterator = batches = iter(dataset)
                iterators += 1
            for _ in range(position.passed_batches):
                # One at a time, since all of them may be more than the memory holds.
                if not pull(batches, 1):
                    break
            pulled = pull(batches, count)
            checksums = gather(self._world, start.full_checksum(pulled[:1]))
            # Another number of ranks divides batches in another way, unless all ranks read the same.
            expected = position.first_checksums
            is_found = checksums == expected
            if len(checksums) != len(expected):
                # If a pipeline divides batches, the ranks together have the same samples, but each has others.
                is_found = (
                    set(checksums) == set(expected)
                    or self._samples_checksum(pulled) == position.samples_checksum
                )
            if is_found:
                return pulled, None if self._knows_length else _UNKNOWN_LENGTH
        ranks = []
        for rank, checksum in enumerate(checksums):
            if rank >= len(expected) or checksum != expected[rank]:
                ranks.append(str(rank))
        return pulled, _OTHER_DATA.format(ranks=", ".join(ranks))

    def _take(self, keras_iterator: Any) -> Any:
        """Take the iterator of an epoch, and return what its first batches are read from."""
        self.keras_iterator = keras_iterator
        if isinstance(keras_iterator, PutBack):
            self.keras_iterator = keras_iterator.source
        self.iterator = self.keras_iterator
        return keras_iterator

    def _samples_checksum(self, pulled: list) -> int:
        """Return the checksum of the first batch of all ranks, the same on any number of ranks."""
        checksum = next_samples.checksum_of([content(batch) for batch in pulled[:1]])
        return sum(gather(self._world, checksum))


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
    "in Python; or other data.\nWhat to do: call keras.utils.set_random_seed before the dataset is made, and shuffle "
    "with tf.data."
)
