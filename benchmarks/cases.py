"""The benchmark cases, their rounds, and the rivals of each round. Imports no TensorFlow.

A rival's step is made by its side (``sides``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from benchmarks import sides

MIRRORED = "MultiWorkerMirroredStrategy"
ALONE = "no communication"
FUNCTION = "npu_device"
EAGER = "npu_device, eager"
RING = "npu_device, TensorFlow's ring"
GLOO = "torch Gloo"
MPICH = "MPICH"
TCP_BETWEEN, RING_BETWEEN, MPI_BETWEEN = "TCP", "TensorFlow's ring (default)", "MPI"
ONE_PROCESS, TWO_RANKS = "one process, all cores", "2 ranks, one host"
TWO_DEVICES, TWO_HOSTS = "MirroredStrategy, two logical CPUs", "2 hosts of one core"
WHOLE, DIVIDED = "whole batch on each rank", "pipeline"
TUNED = "npu_device, copies past the cache"
WHOLE_UPDATE, DIVIDED_UPDATE = "all_reduce, each rank updates all", "divided updates"

_SEGMENTS = (1, 4, 8)
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (4, 64 * _KIB, _MIB, 16 * _MIB, 100 * _MIB)
_QUICK_SIZES = (4, _MIB)
RESNET50_BYTES = 102_334_368
BERT_BYTES = 437_928_968
_CHAIN_BYTES = 161 * 4
_MLP_BYTES = 2_678_824
SAMPLES = {"resnet50": 4, "bert": 2, "mlp": 128}
"""In a rank's batch."""
READ_SAMPLES = 256
"""That are read in a step."""


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
        size: bytes that are reduced, or samples in a step.
        steps: steps that are timed in one go.
        rivals: the participants, in the order of the table.
        turns: how often each is timed in a repetition. Small differences need more.
        gbit: Gbit/s that each of the hosts may send, if some rivals are between hosts.
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
        title: what is measured.
        rounds: the rounds that are measured.
        one_side_at_a_time: the sides don't fit into memory together, and run one after the other.
    """

    name: str
    title: str
    rounds: tuple[Round, ...]
    one_side_at_a_time: bool = False


def all_reduce(quick: bool, ranks: int) -> Case:
    """Return the case that times one all_reduce (sum, float32) by size."""
    rounds = []
    for size in _QUICK_SIZES if quick else _SIZES:
        rivals = [
            Rival(FUNCTION, sides.SHARED_MEMORY, "all_reduce", (size, False)),
            Rival(EAGER, sides.SHARED_MEMORY, "all_reduce", (size, True)),
            Rival(RING, sides.TENSORFLOW, "all_reduce", (size, False)),
            Rival(MIRRORED, sides.MIRRORED, "all_reduce", (size,)),
            Rival(GLOO, sides.GLOO, "all_reduce", (size,)),
            Rival(MPICH, sides.MPICH, "all_reduce", (size,)),
        ]
        rounds.append(Round(size_text(size), size, steps_for(size, quick), tuple(rivals)))
    return Case("all_reduce", f"all_reduce, {ranks} ranks", tuple(rounds))


def resnet50(quick: bool, ranks: int) -> Case:
    """Return the case of a training step whose gradients are 102 MB."""
    steps = 1 if quick else 5 if ranks == 2 else 2
    one_round = Round("step", RESNET50_BYTES, steps, _training("resnet50", ranks))
    return Case("resnet50", f"ResNet-50, {ranks} ranks", (one_round,))


def bert(quick: bool, ranks: int) -> Case:
    """Return the case of a training step whose gradients are 438 MB: communication outweighs everything else."""
    one_round = Round("step", BERT_BYTES, 1 if quick else 2, _training("bert", ranks))
    return Case("bert", f"BERT, {ranks} ranks", (one_round,), one_side_at_a_time=True)


def hosts_all_reduce(quick: bool, ranks: int) -> Case:
    """Return the case of all_reduce between hosts of one rank each. Four share the cores of two."""
    rounds = []
    for size in _QUICK_SIZES if quick else (4, 100 * _MIB):
        rivals = (
            Rival(RING_BETWEEN, sides.RING_OF_HOSTS, "all_reduce", (size, False)),
            Rival(TCP_BETWEEN, sides.TCP_OF_HOSTS, "all_reduce", (size, False)),
            Rival(MPI_BETWEEN, sides.MPI_OF_HOSTS, "all_reduce", (size, False)),
            Rival(GLOO, sides.GLOO_OF_HOSTS, "all_reduce", (size,)),
            Rival(MPICH, sides.MPICH_OF_HOSTS, "all_reduce", (size,)),
        )
        rates = _rates(quick or ranks > 2)
        rounds += [
            Round(size_text(size), size, steps_for(size, quick), rivals, gbit=gbit)
            for gbit in rates
        ]
    return Case("hosts_all_reduce", "all_reduce", tuple(rounds))


def hosts_resnet50(quick: bool, ranks: int) -> Case:
    """Return the case of ResNet-50's training step between two hosts."""
    return Case(
        "hosts_resnet50",
        "ResNet-50",
        _between_hosts("resnet50", RESNET50_BYTES, 1 if quick else 4, quick),
    )


def hosts_bert(quick: bool, ranks: int) -> Case:
    """Return the case of BERT's training step between two hosts."""
    rounds = _between_hosts("bert", BERT_BYTES, 1 if quick else 2, quick)
    return Case("hosts_bert", "BERT", rounds, one_side_at_a_time=True)


def checks(quick: bool, ranks: int) -> Case:
    """Return the case of what tracing and watching cost, in real steps and in steps of little else."""
    rounds = []
    models = (
        ("resnet50", RESNET50_BYTES, 3, 10),
        ("mlp", _MLP_BYTES, 130, 20),
        ("chain", _CHAIN_BYTES, 200, 10),
    )
    for model, size, steps, turns in models:
        for what, side in (("traced", sides.SHARED_MEMORY), ("watched", sides.WATCHED)):
            rivals = tuple(
                Rival(f"{word}{what}", side, f"{word}{what}_training", (model,))
                for word in ("un", "")
            )
            rounds.append(
                Round(
                    f"{model}, {what}",
                    size,
                    1 if quick else steps,
                    rivals,
                    turns=1 if quick else turns,
                )
            )
    return Case("checks", "what checks cost", tuple(rounds))


def compiled(quick: bool, ranks: int) -> Case:
    """Return the case of steps that XLA compiles, on one process."""
    rounds = []
    for model, steps in (("resnet50", 3), ("bert", 2), ("mlp", 50)):
        rivals = tuple(
            Rival(
                label,
                sides.ONE_PROCESS,
                "training",
                (model, False, None, None, label == "jit_compile"),
            )
            for label in ("as it is", "jit_compile")
        )
        rounds.append(
            Round(f"{model}, XLA on one process", SAMPLES[model], 1 if quick else steps, rivals)
        )
    return Case("compiled", "what XLA changes", tuple(rounds))


def faster(quick: bool, ranks: int) -> Case:
    """Return the case of the same work on one process, on devices of one, on ranks and on hosts."""
    rounds = []
    for model, steps in (("resnet50", 3), ("bert", 2), ("mlp", 50)):
        rivals = (
            Rival(
                ONE_PROCESS, sides.ONE_PROCESS, "training", (model, False, None, None, False, ranks)
            ),
            Rival(TWO_DEVICES, sides.TWO_DEVICES, "training", (model,)),
            Rival(TWO_RANKS, sides.SHARED_MEMORY, "training", (model, True, None)),
            Rival(f"{TWO_RANKS}, {ALONE}", sides.SHARED_MEMORY, "training", (model, False, None)),
            Rival(TWO_HOSTS, sides.RING_OF_HOSTS, "training", (model, True, None)),
        )
        rounds.append(
            Round(model, ranks * SAMPLES[model], 1 if quick else steps, rivals, gbit=10.0)
        )
    readers = (
        Rival(ONE_PROCESS, sides.ONE_PROCESS, "reading", ("images", True)),
        Rival(TWO_DEVICES, sides.TWO_DEVICES, "reading", ("images",)),
        Rival(TWO_RANKS, sides.SHARED_MEMORY, "reading", ("images", True)),
        Rival(TWO_HOSTS, sides.RING_OF_HOSTS, "reading", ("images", True)),
    )
    rounds.append(Round("images", READ_SAMPLES, 1, readers, gbit=10.0))
    return Case("faster", "samples a second", tuple(rounds), one_side_at_a_time=True)


def reading(quick: bool, ranks: int) -> Case:
    """Return the case of ``fit`` with input pipelines of some 5 ms a sample."""
    rounds = []
    for keras, kind in itertools.product(("keras", "tf_keras"), ("images", "records", "augmented")):
        rivals = (
            Rival(ONE_PROCESS, sides.ONE_PROCESS, "reading", (kind, True, keras)),
            Rival(WHOLE, sides.SHARED_MEMORY, "reading", (kind, False, keras)),
            Rival(DIVIDED, sides.SHARED_MEMORY, "reading", (kind, True, keras)),
        )
        rounds.append(Round(f"{kind}, {keras}", READ_SAMPLES, 1, rivals))
    return Case("reading", f"input, {ranks} ranks", tuple(rounds))


def updates(quick: bool, ranks: int) -> Case:
    """Return the case of updates divided among the ranks, in steps of optimizers with state; and of a save.

    Alone: ``python -m benchmarks --cases updates --ranks 2 --repeats 3 --wait-minutes 0``.
    """
    savers = (
        Rival(WHOLE_UPDATE, sides.SHARED_MEMORY, "saving", ("resnet50", "momentum", False)),
        Rival(DIVIDED_UPDATE, sides.SHARED_MEMORY, "saving", ("resnet50", "momentum", True)),
    )
    save = Round("resnet50, keras, momentum, a save", RESNET50_BYTES, 1, savers)
    rounds = (*_updates("keras", quick, ranks), save)
    title = f"divided updates, {ranks} ranks"
    return Case("updates", title, rounds, one_side_at_a_time=True)


def updates_tf_keras(quick: bool, ranks: int) -> Case:
    """Return the case of steps of tf-keras's optimizers; both Kerases at once need more than 24 GiB."""
    rounds = _updates("tf_keras", quick, ranks)
    title = f"divided updates of tf-keras, {ranks} ranks"
    return Case("updates_tf_keras", title, rounds, one_side_at_a_time=True)


def _updates(keras: str, quick: bool, ranks: int) -> tuple[Round, ...]:
    rounds = []
    for model, optimizer, steps in (("resnet50", "momentum", 5), ("bert", "adam", 2)):
        work = (model, keras, optimizer)
        rivals = (
            Rival(ALONE, sides.SHARED_MEMORY, "updating", (*work, "alone")),
            Rival(WHOLE_UPDATE, sides.SHARED_MEMORY, "updating", (*work, "whole")),
            Rival(DIVIDED_UPDATE, sides.SHARED_MEMORY, "updating", (*work, "divided")),
            Rival(ONE_PROCESS, sides.ONE_PROCESS, "updating", (*work, "alone", ranks)),
        )
        label = f"{model}, {keras}, {optimizer}"
        rounds.append(Round(label, ranks * SAMPLES[model], 1 if quick else steps, rivals))
    return tuple(rounds)


def copies(quick: bool, ranks: int) -> Case:
    """Return the case of what ``GLIBC_TUNABLES`` changes, which writes large copies past the cache, in sums and steps.

    Alone: ``python -m benchmarks --cases copies --ranks 2 --repeats 20``.
    """
    works: list[tuple[str, int, int, str, tuple[Any, ...]]] = [
        (size_text(size), size, steps_for(size, quick), "all_reduce", (size, False))
        for size in (_MIB, 16 * _MIB, 100 * _MIB)
    ]
    for model, steps in (("resnet50", 3), ("bert", 1), ("mlp", 50)):
        size = ranks * SAMPLES[model]
        works.append((model, size, 1 if quick else steps, "training", (model, True, None)))
    works.append(("images", READ_SAMPLES, 1, "reading", ("images", True)))
    rounds = tuple(
        Round(
            label,
            size,
            steps,
            (
                Rival(FUNCTION, sides.SHARED_MEMORY, method, arguments),
                Rival(TUNED, sides.TUNED_COPIES, method, arguments),
            ),
        )
        for label, size, steps, method, arguments in works
    )
    return Case("copies", f"copies past the cache, {ranks} ranks", rounds)


def hosts_updates(quick: bool, ranks: int) -> Case:
    """Return the case of updates divided between two hosts, by the engines that can.

    Alone: ``python -m benchmarks --cases hosts_updates --ranks 2 --repeats 2 --wait-minutes 0``.
    """
    rivals = []
    for label, side in ((TCP_BETWEEN, sides.TCP_OF_HOSTS), (MPI_BETWEEN, sides.MPI_OF_HOSTS)):
        for text, way in ((WHOLE_UPDATE, "whole"), (DIVIDED_UPDATE, "divided")):
            arguments = ("resnet50", "keras", "momentum", way)
            rivals.append(Rival(f"{label}, {text}", side, "updating", arguments))
    steps = 1 if quick else 4
    rounds = []
    for gbit in _rates(quick):
        label = f"resnet50, keras, momentum, {gbit:g} Gbit/s"
        rounds.append(Round(label, RESNET50_BYTES, steps, tuple(rivals), gbit=gbit))
    return Case("hosts_updates", "ResNet-50, momentum", tuple(rounds), one_side_at_a_time=True)


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
            Rival("MirroredStrategy", sides.TWO_DEVICES, "training", (model,)),
            Rival(MIRRORED, sides.GPU_MIRRORED, "training", (model,)),
        ]
    one_round = Round("step", RESNET50_BYTES, 1 if quick else 20, tuple(rivals))
    return Case(
        "gpu", f"{model}, {min(gpus, ranks)} {device}s", (one_round,), one_side_at_a_time=True
    )


def _training(model: str, ranks: int) -> tuple[Rival, ...]:
    rivals = [
        Rival(ALONE, sides.SHARED_MEMORY, "training", (model, False, None)),
        Rival(FUNCTION, sides.SHARED_MEMORY, "training", (model, True, None)),
    ]
    for count in _SEGMENTS if ranks == 2 else ():
        label = f"npu_device, {count} segment{'s' if count > 1 else ''}"
        rivals.append(Rival(label, sides.SHARED_MEMORY, "training", (model, True, count)))
    rivals.append(Rival(RING, sides.TENSORFLOW, "training", (model, True, None)))
    rivals.append(Rival(MIRRORED, sides.MIRRORED, "training", (model,)))
    return tuple(rivals)


def _between_hosts(model: str, size: int, steps: int, quick: bool) -> tuple[Round, ...]:
    rivals = [Rival(ALONE, sides.RING_OF_HOSTS, "training", (model, False, None))]
    for label, side in (
        (RING_BETWEEN, sides.RING_OF_HOSTS),
        (TCP_BETWEEN, sides.TCP_OF_HOSTS),
        (MPI_BETWEEN, sides.MPI_OF_HOSTS),
    ):
        rivals.append(Rival(label, side, "training", (model, True, None)))
        if label != MPI_BETWEEN:
            rivals.append(
                Rival(f"{label}, 4 segments, bf16", side, "training", (model, True, 4, "bf16"))
            )
    rivals.append(Rival(MIRRORED, sides.MIRRORED_OF_HOSTS, "training", (model,)))
    return tuple(Round("step", size, steps, tuple(rivals), gbit=gbit) for gbit in _rates(quick))


def _rates(quick: bool) -> tuple[float, ...]:
    return (10.0,) if quick else (1.0, 10.0)


def steps_for(size: int, quick: bool) -> int:
    """Return how many all_reduces of some bytes are timed in one go."""
    return 1 if quick else max(2, min(200, 64 * _MIB // size))


def size_text(size: int) -> str:
    """Return a number of bytes as a text."""
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


CASES = {
    case.__name__: case
    for case in (
        *(all_reduce, resnet50, bert, hosts_all_reduce, hosts_resnet50, hosts_bert),
        *(checks, compiled, faster, reading, updates, updates_tf_keras, copies, hosts_updates),
    )
}
START = "start"
"""A case without sides; see ``start``."""

SHORT = (
    *(
        ("all_reduce", 2),
        ("resnet50", 2),
        ("faster", 2),
        ("hosts_all_reduce", 2),
        ("reading", 2),
        (START, 2),
    ),
    *(("bert", 2), ("updates", 2), ("hosts_resnet50", 2), ("checks", 2), ("compiled", 1)),
)
FULL = (
    *SHORT,
    ("hosts_bert", 2),
    ("reading", 3),
    ("all_reduce", 4),
    ("resnet50", 4),
    ("updates", 4),
    ("updates_tf_keras", 2),
    ("copies", 2),
    ("hosts_updates", 2),
    ("hosts_all_reduce", 4),
)
"""Cases with their numbers of ranks, in the order in which they run: the most important ones first."""
