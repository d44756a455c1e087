"""What is measured: the cases, their rounds, and the rivals of each round. Imports no TensorFlow.

How a rival's step is made is ``npu_side``'s and ``mirrored_side``'s part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIRRORED = "MultiWorkerMirroredStrategy"
ALONE = "no communication"
FUNCTION = "npu_device"
EAGER = "npu_device eager"

_SEGMENTS = (1, 2, 4, 8)
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (4, _KIB, 64 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB)
_QUICK_SIZES = (4, _MIB)


@dataclass(frozen=True)
class Rival:
    """One way to do a round's work.

    Attributes:
        label: its name in the table.
        side: whose processes run it: ``"npu"`` or ``"mirrored"``.
        method: the method of the side that makes its step, and ``arguments`` for it.
    """

    label: str
    side: str
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Round:
    """Rivals that are timed in turn.

    Attributes:
        label: what they all do.
        size: bytes that are reduced.
        steps: steps that are timed in one go.
        rivals: who takes part, in the order of the table.
    """

    label: str
    size: int
    steps: int
    rivals: tuple[Rival, ...]


@dataclass(frozen=True)
class Case:
    """Rounds for which the processes are started once.

    Attributes:
        name: how the command line calls it.
        title: heading of its table.
        most_ranks: more ranks than that don't fit into 24 GiB.
        rounds: what is measured.
    """

    name: str
    title: str
    most_ranks: int
    rounds: tuple[Round, ...]


def all_reduce(quick: bool) -> Case:
    """The time of one all_reduce (sum, float32), by size."""
    rounds = []
    for size in _QUICK_SIZES if quick else _SIZES:
        rivals = (
            Rival(FUNCTION, "npu", "all_reduce", (size, False)),
            Rival(EAGER, "npu", "all_reduce", (size, True)),
            Rival(MIRRORED, "mirrored", "all_reduce", (size,)),
        )
        rounds.append(Round(_size_text(size), size, 1 if quick else max(2, min(50, 32 * _MIB // size)), rivals))
    return Case("all_reduce", "all_reduce of float32", 4, tuple(rounds))


def resnet50(quick: bool) -> Case:
    """A training step whose gradients are 102 MB."""
    title = "training step of ResNet-50, 96×96, batch 4 a rank"
    return Case("resnet50", title, 4, (_training("resnet50", 102_334_368, 1 if quick else 5),))


def bert(quick: bool) -> Case:
    """A training step whose gradients are 438 MB: communication outweighs everything else."""
    title = "training step of a BERT-base-sized stack, 2×32 tokens a rank"
    return Case("bert", title, 2, (_training("bert", 437_928_968, 1 if quick else 2),))


def _training(model: str, size: int, steps: int) -> Round:
    rivals = [
        Rival(ALONE, "npu", "training", (model, False, None)),
        Rival("npu_device, default split", "npu", "training", (model, True, None)),
    ]
    for count in _SEGMENTS:
        label = f"npu_device, {count} segment{'s' if count > 1 else ''}"
        rivals.append(Rival(label, "npu", "training", (model, True, count)))
    rivals.append(Rival(MIRRORED, "mirrored", "training", (model,)))
    return Round("step", size, steps, tuple(rivals))


def _size_text(size: int) -> str:
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


CASES = {"all_reduce": all_reduce, "resnet50": resnet50, "bert": bert}
