"""Engines between hosts: TCP, MPI, TensorFlow's ring, torch's Gloo and MPICH alone, at links of any chosen speed.

``sudo .venv/bin/python -m benchmarks.between_hosts`` needs root, ``ip`` and ``tc``. Two hosts are network namespaces
with a core each. All processes of a case are started once, and take turns; the speed of the links changes between
rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results, sides
from benchmarks.cases import (
    ALONE,
    BERT_BYTES,
    GLOO,
    LINK_SIZES,
    LINK_STEPS,
    MPICH,
    RESNET50_BYTES,
    Case,
    Rival,
    Round,
    steps_for,
)
from benchmarks.measuring import run_case
from benchmarks.table import tables
from npu_device._src.testing import hosts

TCP, RING, MPI = "TCP", "TensorFlow's ring", "MPI"
_SIDES = {TCP: sides.TCP_OF_HOSTS, RING: sides.RING_OF_HOSTS, MPI: sides.MPI_OF_HOSTS}

_MOST_RANKS = 8
_MIB = 1 << 20
_SIZES = (4, _MIB, 16 * _MIB, 100 * _MIB)
_QUICK_SIZES = (4, _MIB)
# Segments, None for the default split, and compression.
_SPLITS = ((None, None), (1, None), (4, None), (8, None), (None, "bf16"), (4, "bf16"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.between_hosts",
        description="Engines between two hosts, which are network namespaces of this machine with a core each.",
    )
    rates = "Gbit/s that each host may send, 0 for no limit (default: 1 10 25 0)"
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 10.0, 25.0, 0.0], help=rates)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to measure (default: all)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="which share its core (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="how often each rival is timed (default: 3)")
    parser.add_argument("--quick", action="store_true", help="two sizes, one step a repetition: to see that it works")
    parser.add_argument("--output", type=Path, default=Path("build/between_hosts"), help="default: build/between_hosts")
    options = parser.parse_args(arguments)
    if not hosts.can_be_made():
        sys.exit("network namespaces need root, ip and tc. What to do: install iproute2, and start it with sudo.")
    run = results.begin(options.repeats)
    for name in options.cases:
        with hosts.hosts(sides.HOSTS, options.rates[0]):
            case = CASES[name](options.quick, options.rates)
            ranks = sides.HOSTS * options.ranks_per_host
            run.cases.append(run_case(case, ranks, options.repeats, options.output / "logs"))
        run.write(options.output / "results.json")
    print(tables(run), end="")


def all_reduce(quick: bool, rates: Sequence[float]) -> Case:
    """Return the case that times one all_reduce (sum, float32) by size."""
    rounds = []
    for size in _QUICK_SIZES if quick else _SIZES:
        rivals = (
            *(Rival(engine, side, "all_reduce", (size, False)) for engine, side in _SIDES.items()),
            *(Rival(f"{engine}, eager", side, "all_reduce", (size, True)) for engine, side in _SIDES.items()),
            Rival(GLOO, sides.GLOO_OF_HOSTS, "all_reduce", (size,)),
            Rival(MPICH, sides.MPICH_OF_HOSTS, "all_reduce", (size,)),
        )
        rounds += [Round(_rate(gbit), size, steps_for(size, quick), rivals, gbit=gbit) for gbit in rates]
    return Case("all_reduce", "all_reduce of float32 between hosts", LINK_SIZES, _MOST_RANKS, tuple(rounds))


def resnet50(quick: bool, rates: Sequence[float]) -> Case:
    """Return the case of ResNet-50's training step, whose gradients are 102 MB."""
    title = "training step of ResNet-50 between hosts, 96×96, batch 4 per rank"
    rounds = _training("resnet50", RESNET50_BYTES, 1 if quick else 4, rates)
    return Case("resnet50", title, LINK_STEPS, _MOST_RANKS, rounds)


def bert(quick: bool, rates: Sequence[float]) -> Case:
    """Return the case of BERT's training step, whose gradients are 438 MB."""
    title = "training step of a BERT-base-sized stack between hosts, 2×32 tokens per rank"
    rounds = _training("bert", BERT_BYTES, 1 if quick else 2, rates)
    return Case("bert", title, LINK_STEPS, _MOST_RANKS, rounds, one_side_at_a_time=True)


CASES = {case.__name__: case for case in (all_reduce, resnet50, bert)}


def _training(model: str, size: int, steps: int, rates: Sequence[float]) -> tuple[Round, ...]:
    rivals = [Rival(ALONE, sides.TCP_OF_HOSTS, "training", (model, False, None))]
    for label, side in _SIDES.items():
        for segments, compression in _SPLITS:
            split = "default split" if segments is None else f"{segments} segments" if segments > 1 else "1 segment"
            name = ", ".join(filter(None, (label, split, compression)))
            rivals.append(Rival(name, side, "training", (model, True, segments, compression)))
    return tuple(Round(_rate(gbit), size, steps, tuple(rivals), gbit=gbit) for gbit in rates)


def _rate(gbit: float) -> str:
    return f"{gbit:g} Gbit/s" if gbit else "no limit"


if __name__ == "__main__":
    main()
