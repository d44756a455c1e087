"""``python -m benchmarks.soak``: a job that goes on for long, and whether its ranks hold more and more.

What the steps do stands in ``soak_side``. After each tenth of them every rank says what it holds; what grows once the
job has settled is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.held import Sample
from benchmarks.process_set import ProcessSet
from benchmarks.sides import SOAK, soak_side

TENTHS = 10
SETTLED = 3000
"""Steps. By then everything has happened many times, and the keys of TensorFlow's backend have come round."""

_AT_ONCE = 500  # steps; in between a rank that has failed is noticed


@dataclass(frozen=True)
class Row:
    """The resources that the ranks hold after a number of steps; the samples are by rank."""

    steps: int
    samples: list[Sample]


def grown(rows: Sequence[Row], tolerance: int) -> list[str]:
    """Return what has grown after the first tenth, or after ``SETTLED`` steps where a tenth is less; a line each.

    Args:
        rows: by tenth.
        tolerance: bytes of memory that a rank may hold more at the end. Everything else is to be the same.
    """
    settled = _settled(rows)
    found = []
    for rank, (first, last) in enumerate(zip(settled.samples, rows[-1].samples)):
        if last.memory - first.memory > tolerance:
            found.append(f"rank {rank}: memory, from {_megabytes(first)} to {_megabytes(last)} MB")
        for name in ("descriptors", "threads", "mappings"):
            before, after = getattr(first, name), getattr(last, name)
            if after > before:
                found.append(f"rank {rank}: {name}, from {before} to {after}")
    return [f"{line} since step {settled.steps}" for line in found]


def _settled(rows: Sequence[Row]) -> Row:
    return next((row for row in rows[:-1] if row.steps >= SETTLED), rows[0])


def soak(backend: str, ranks: int, steps: int, seconds: float, logs: Path) -> list[Row]:
    """Run a job; what its ranks held, by tenth.

    Args:
        backend: one of ``sides.SOAK``.
        ranks: how many.
        steps: how many.
        seconds: after which no tenth is begun any more; the tenths become shorter if need be.
        logs: directory for the ranks' output.
    """
    processes = ProcessSet(soak_side(backend), ranks, logs)
    try:
        rows: list[Row] = []
        began, done = time.monotonic(), 0
        for tenth in range(1, TENTHS + 1):
            end = steps * tenth // TENTHS
            while done < end and time.monotonic() - began < seconds * tenth / TENTHS:
                until = min(done + _AT_ONCE, end)
                processes.ask("call", "run", done, until)
                done = until
            rows.append(Row(done, processes.ask("call", "sample")))
            held = ", ".join(_megabytes(sample) for sample in rows[-1].samples)
            print(f"{done} steps after {time.monotonic() - began:.0f} s: {held} MB", file=sys.stderr, flush=True)
    finally:
        processes.close()
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the samples as a Markdown table."""
    ranks = range(len(rows[0].samples))
    lines = [
        "| steps | " + " | ".join(f"rank {rank}: MB | descriptors | threads | mappings" for rank in ranks) + " |",
        "|--:|" + "--:|" * (4 * len(ranks)),
    ]
    for row in rows:
        cells = [f"{_megabytes(held)} | {held.descriptors} | {held.threads} | {held.mappings}" for held in row.samples]
        lines.append(f"| {row.steps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _megabytes(sample: Sample) -> str:
    return f"{sample.memory / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=SOAK, default=SOAK[0], help="none: each rank by itself, for comparison")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="make fewer steps rather than take longer")
    parser.add_argument("--tolerance", type=float, default=8.0, help="MB that a rank may grow by once it has settled")
    parser.add_argument("--logs", type=Path, help="directory for the ranks' output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        rows = soak(arguments.backend, arguments.ranks, arguments.steps, arguments.seconds, logs)
    print(table(rows))
    problems = grown(rows, int(arguments.tolerance * 1e6))
    if problems:
        sys.exit("these grew:\n" + "\n".join(problems))
    between = f"from step {_settled(rows).steps} to {rows[-1].steps}"
    print(f"flat {between}: no rank took {arguments.tolerance:g} MB more, or more of anything else")
    if rows[-1].steps <= SETTLED:
        print(f"These are too few steps to say much; a job settles in about {SETTLED}.")


if __name__ == "__main__":
    main()
