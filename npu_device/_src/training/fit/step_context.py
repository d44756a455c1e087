"""What a step needs of the function that Keras calls."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training.fit.batch_checksum import RunningChecksum
from npu_device._src.training.fit.model_objects import ModelObjects, objects_of
from npu_device._src.training.fit.randomness import RandomNumbers
from npu_device._src.world.current_step import Sums
from npu_device._src.world.share import Share


# Contexts are compared by identity, as Keras tells functions apart.
@dataclass(eq=False)
class StepContext:
    """What surrounds the steps of one mode.

    Attributes:
        world: with which the step exchanges: a ``World``, or ranks that are only virtual.
        mode: ``"train"``, ``"test"``, ``"predict"``, or ``"check"`` for a step that only runs on samples.
        own_step: the step of the model, Keras's or the script's.
        sums: which of the numbers of the step are sums over the samples.
        checksum: of the batches since the ranks last compared them.
        batches_from_root: rank 0's batches are sent to all ranks.
        has_own_data: each rank reads its own rows: ``divided``, a pipeline, a Sequence with ``rows``. The
            batches have tags (``share.is_tagged``).
        warned_logs: of which logs there was a warning, with its text.
        predicts_rows: by the type of a batch, whether all outputs of ``predict`` have rows for the samples.
    """

    world: Any
    model: Any
    mode: str
    own_step: Callable[[Any], Any]
    sums: Sums = field(default_factory=Sums)
    checksum: RunningChecksum = field(default_factory=RunningChecksum)
    batches_from_root: bool = False
    has_own_data: bool = False
    warned_logs: set[tuple[str, str]] = field(default_factory=set)
    predicts_rows: dict[str, bool] = field(default_factory=dict)

    def after_draws(self, numbers: RandomNumbers, share: Share) -> None:
        """Take note of the random numbers that a step has drawn, and its share."""

    @property
    def is_custom(self) -> bool:
        """Return whether the script has written the step, not Keras."""
        return not compat.belongs_to_keras(self.own_step)

    @functools.cached_property
    def objects(self) -> ModelObjects:
        """Return the objects of the model that its step uses; found after the model has been built."""
        return objects_of(self.model)
