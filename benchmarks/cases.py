"""The benchmark cases, their rounds, and the rivals of each round. Imports no TensorFlow.

A rival's step is made by its side (``sides``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import sides

MIRRORED = "MultiWorkerMirroredStrategy"
ALONE = "no communication"
FUNCTION = "npu_device"
EAGER = "npu_device eager"
RING = "npu_device, TensorFlow backend"
GLOO = "torch Gloo"
MPICH = "MPICH"
DEFAULT_SPLIT = "npu_device, default split"
TRACED = "npu_device, traced"

BY_SIZE, STEPS, PAIRS = "by size", "steps", "pairs"
LINK_SIZES, LINK_STEPS = "by size and link", "steps by link"
"""The kinds of tables: bandwidths; steps one below the other; by how much two steps differ; sizes over links of several
speeds, and steps.
"""

_SEGMENTS = (1, 2, 4, 8)
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (4, _KIB, 64 * _KIB, _MIB, 16 * _MIB, 100 * _MIB, 256 * _MIB)
_QUICK_SIZES = (4, _MIB)
_LARGEST_OF_MANY = 100 * _MIB  # from three ranks on
RESNET50_BYTES = 102_334_368
BERT_BYTES = 437_928_968
_CHAIN_BYTES = 161 * 4


@dataclass(frozen=True)
class Rival:
    """One way to do a round's work.

    Attributes:
        label: its name in the table.
        side: the side whose processes run it; one of ``sides.SIDES``.
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
        label: the work that they all do.
        size: bytes that are reduced.
        steps: steps that are timed in one go.
        rivals: the participants, in the order of the table.
        turns: how often each is timed in a repetition. Small differences need more.
        gbit: Gbit/s that each of the hosts may send, 0 for no limit; None if all ranks are on this machine.
    """

    label: str
    size: int
    steps: int
    rivals: tuple[Rival, ...]
    turns: int = 1
    gbit: float | None = None


@dataclass(frozen=True)
class Case:
    """Rounds for which the processes are started once.

    Attributes:
        name: its name on the command line.
        title: heading of its table.
        shows: the kind of its table.
        most_ranks: more ranks don't fit into 24 GiB, or show nothing new.
        rounds: the rounds that are measured.
        one_side_at_a_time: the sides don't fit into memory together, and run one after the other.
    """

    name: str
    title: str
    shows: str
    most_ranks: int
    rounds: tuple[Round, ...]
    one_side_at_a_time: bool = False


def all_reduce(quick: bool, ranks: int) -> Case:
    """Return the case that times one all_reduce (sum, float32) by size."""
    largest = _SIZES[-1] if ranks == 2 else _LARGEST_OF_MANY
    rounds = []
    for size in _QUICK_SIZES if quick else [size for size in _SIZES if size <= largest]:
        rivals = [
            Rival(FUNCTION, sides.SHARED_MEMORY, "all_reduce", (size, False)),
            Rival(EAGER, sides.SHARED_MEMORY, "all_reduce", (size, True)),
            Rival(RING, sides.TENSORFLOW, "all_reduce", (size, False)),
            Rival(MIRRORED, sides.MIRRORED, "all_reduce", (size,)),
            Rival(GLOO, sides.GLOO, "all_reduce", (size,)),
            Rival(MPICH, sides.MPICH, "all_reduce", (size,)),
        ]
        rounds.append(Round(size_text(size), size, steps_for(size, quick), tuple(rivals)))
    return Case("all_reduce", "all_reduce of float32", BY_SIZE, 4, tuple(rounds))


def resnet50(quick: bool, ranks: int) -> Case:
    """Return the case of a training step whose gradients are 102 MB."""
    title = "training step of ResNet-50, 96×96, batch 4 per rank"
    steps = 1 if quick else 5 if ranks == 2 else 2
    one_round = Round("step", RESNET50_BYTES, steps, _training("resnet50", ranks))
    return Case("resnet50", title, STEPS, 4, (one_round,))


def bert(quick: bool, ranks: int) -> Case:
    """Return the case of a training step whose gradients are 438 MB: communication outweighs everything else."""
    title = "training step of a BERT-base-sized stack, 2×32 tokens per rank"
    one_round = Round("step", BERT_BYTES, 1 if quick else 2, _training("bert", ranks))
    return Case("bert", title, STEPS, 2, (one_round,), one_side_at_a_time=True)


def trace(quick: bool, ranks: int) -> Case:
    """Return the case that times the iteration trace: in a real step, and in a step of as many gradients and little
    else, so that fractions of a millisecond show.
    """
    rounds = []
    for model, size, steps in (("resnet50", RESNET50_BYTES, 3), ("chain", _CHAIN_BYTES, 50)):
        for label, side in ((FUNCTION, sides.SHARED_MEMORY), (RING, sides.TENSORFLOW)):
            rivals = (
                Rival(DEFAULT_SPLIT, side, "untraced_training", (model,)),
                Rival(TRACED, side, "traced_training", (model,)),
            )
            rounds.append(Round(f"{model}, {label}", size, 1 if quick else steps, rivals, turns=1 if quick else 12))
    title = "the iteration trace in steps of ResNet-50, and of a chain of layers of one unit, 161 gradients each"
    return Case("trace", title, PAIRS, 2, tuple(rounds))


def on_gpus(quick: bool, ranks: int, model: str, gpus: int, device: str) -> Case:
    """Return the case of a training step on GPUs.

    Args:
        quick: one step a repetition.
        ranks: number of ranks.
        model: see ``trainee``.
        gpus: the machine's GPUs. With fewer than ranks, what needs one per rank is left out.
        device: what stands in the title: ``GPU``, or ``CPU`` where CPUs take their place.
    """
    rivals = [
        Rival(ALONE, sides.GPU_HOST_MEMORY, "training", (model, False, None)),
        Rival("npu_device, host memory", sides.GPU_HOST_MEMORY, "training", (model, True, None)),
    ]
    if gpus >= ranks:
        rivals += [
            Rival("npu_device, NCCL", sides.GPU_NCCL, "training", (model, True, None)),
            Rival("MirroredStrategy", sides.GPU_ONE_PROCESS, "training", (model,)),
            Rival(MIRRORED, sides.GPU_MIRRORED, "training", (model,)),
        ]
    one_round = Round("step", RESNET50_BYTES, 1 if quick else 20, tuple(rivals))
    title = f"training step of {model} on {min(gpus, ranks)} {device}s"
    return Case("gpu", title, STEPS, ranks, (one_round,), one_side_at_a_time=True)


def _training(model: str, ranks: int) -> tuple[Rival, ...]:
    rivals = [
        Rival(ALONE, sides.SHARED_MEMORY, "training", (model, False, None)),
        Rival(DEFAULT_SPLIT, sides.SHARED_MEMORY, "training", (model, True, None)),
    ]
    for count in _SEGMENTS if ranks == 2 else ():
        label = f"npu_device, {count} segment{'s' if count > 1 else ''}"
        rivals.append(Rival(label, sides.SHARED_MEMORY, "training", (model, True, count)))
    rivals.append(Rival(RING, sides.TENSORFLOW, "training", (model, True, None)))
    rivals.append(Rival(MIRRORED, sides.MIRRORED, "training", (model,)))
    return tuple(rivals)


def steps_for(size: int, quick: bool) -> int:
    """Return how many all_reduces of some bytes are timed in one go."""
    return 1 if quick else max(2, min(200, 64 * _MIB // size))


def size_text(size: int) -> str:
    """Return a number of bytes as a text."""
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


CASES = {case.__name__: case for case in (all_reduce, resnet50, bert, trace)}
