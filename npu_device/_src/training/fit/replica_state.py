"""What the functions of one replicated model share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from npu_device._src.collectives.engine_text import say
from npu_device._src.training.fit import start, xla
from npu_device._src.training.fit.weighting import replicate_optimizer
from npu_device._src.training.watching import training_state
from npu_device._src.world.world import World


@dataclass(eq=False)
class ReplicaState:
    """The state of one replicated model between the calls of Keras.

    Attributes:
        in_fit: a ``fit`` is running.
        root_rank: from whose variables the next training starts.
        callbacks: of the newest ``fit``.
        shard_optimizer: divide the updates of the optimizers among the ranks; None: as NPU_DEVICE_SHARD_OPTIMIZER says.
    """

    world: World
    model: Any
    shard_optimizer: bool | None = None
    callbacks: Any = None

    in_fit = False
    root_rank = 0
    _is_reported = False

    def prepare(self, mode: str) -> None:
        """Set what must be set before Keras makes a function."""
        xla.leave_call(self.model)
        start.keep_steps_per_execution(self.world, self.model)
        if mode == "train":
            for optimizer in training_state.optimizers(self.model):
                replicate_optimizer(optimizer, self.world, self.shard_optimizer)

    def report(self, rows: int | None, checked: str) -> None:
        """Print the statement at the start, once; ``rows`` are those of the first batch, None of own data."""
        if self._is_reported:
            return
        self._is_reported = True
        if self.world.is_main:
            callback = self.callbacks
            # The last callback is the package's own, in which the ranks meet: Keras has set its ``params``.
            if isinstance(callback, list):
                callback = callback[-1]
            steps = (getattr(callback, "params", None) or {}).get("steps")
            say(start.statement(self.world, self.model, rows, steps, checked))
