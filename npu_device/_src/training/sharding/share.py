"""The mark of a slot that one rank holds, and what the others see of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from npu_device._src import compat
from npu_device._src.world.world import World


class Share:
    """The owner of a slot, and whether its value has gone to it; an attribute of the optimizer's variable.

    Attributes:
        owner: the rank of the job.
        is_apart: only the owner has the value; before, at the first step, all ranks have.
    """

    def __init__(self, owner: int, rank: int) -> None:
        self.owner = owner
        self.is_apart = False
        self._rank = rank

    def read(self, variable: Any) -> NoReturn:
        """Refuse to read a slot that another rank holds."""
        raise RuntimeError(
            f"rank {self._rank}: {variable.path} can't be read or saved here: with shard_optimizer=True, only rank "
            f"{self.owner} holds it.\nWhat to do: save weights only (model.save_weights, "
            "tf.train.Checkpoint(model=model) of a model without its optimizer), or leave out shard_optimizer=True "
            "where the state of the optimizer is to be saved."
        )

    def assign(self, variable: Any, value: Any) -> None:
        """Leave a value to the owner, which is assigned the same one: every rank loads a file."""


def mark(variable: Any, share: Share) -> None:
    vars(variable)[compat.SHARE] = share


def without_initial_slots(world: World, variables: Sequence[Any], root_rank: int) -> list[Any]:
    """Return variables without the slots of divided updates that the root neither owns nor has another value for than
    the initial one, which their owners have, too; every rank makes the call.
    """
    slots = [place for place, variable in enumerate(variables) if compat.is_share(variable)]
    if not slots:
        return list(variables)
    here = [place for place in slots if compat.has_memory(variables[place])]
    root = world.group.ranks[root_rank]
    of_root = [place for place in here if getattr(variables[place], compat.SHARE).owner != root]
    sent = set(world.object_from_root(of_root, root_rank))
    return [
        variable
        for place, variable in enumerate(variables)
        if place in sent or not compat.is_share(variable)
    ]
