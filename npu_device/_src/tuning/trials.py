"""Which gradient split is the fastest: the splits that ``npurun --tune`` tries, and what their traces say.

There is no model of the network behind it: over links of 1 and 10 Gbit/s, a few segments of equal bytes were as fast as
the best split that a model found (docs/notes.md). Imports no TensorFlow.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from npu_device._src.gradients.split_strategy import cut_by_size
from npu_device._src.trace.records import RankTrace, on_all_ranks, read

Split = Optional[tuple[float, ...]]
"""Percentages as ``set_split_strategy_by_size`` takes them; None for the current split of the script."""

SPLITS: tuple[Split, ...] = (None, (100,), (25,) * 4, (12.5,) * 8)
"""What is tried. One segment suits small models, and several overlap with backward."""

WARM_UP = 2
"""Traced iterations at the start of each run that don't count: they compile, and fill caches."""


@dataclass(frozen=True)
class Run:
    """A run of the script, which has to make ``steps`` traced steps: the first ones warm up."""

    name: str
    split: Split
    steps: int


@dataclass
class Tried:
    """A split with its runs: the seconds of each step, and those of communication after backward."""

    split: Split
    seconds: list[list[float]] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    segments: int = 0

    @property
    def undisturbed(self) -> list[float]:
        """Return the seconds of a step for each run, the lower quartile: disturbances only make steps longer."""
        return [sorted(run)[len(run) // 4] for run in self.seconds]

    @property
    def step(self) -> float:
        """Return the seconds of an undisturbed step, the median of the runs."""
        return statistics.median(self.undisturbed)

    def faster_than(self, other: Tried) -> bool:
        """Return True when it was faster in every round: a machine that gets slower or faster does so for both."""
        return all(mine < theirs for mine, theirs in zip(self.undisturbed, other.undisturbed))


def runs(splits: Sequence[Split] = SPLITS, rounds: int = 2, steps: int = 6) -> Iterator[Run]:
    """Yield the runs: back and forth, so that a machine that gets slower or faster affects all splits alike."""
    number = 0
    for turn in range(rounds):
        for split in splits if turn % 2 == 0 else splits[::-1]:
            number += 1
            yield Run(f"run{number}", split, WARM_UP + steps)


def add(tried: dict[Split, Tried], run: Run, directory: Path) -> None:
    """Add the trace of a run."""
    traces = read(directory)
    missing = sorted(set(range(traces[0].world_size if traces else 1)) - {trace.rank for trace in traces})
    if missing:
        raise ValueError(f"{directory} has no trace of rank(s) {', '.join(map(str, missing))}")
    _require_split(run, traces[0])
    iterations = on_all_ranks(traces)[WARM_UP:]
    one = tried.setdefault(run.split, Tried(run.split))
    # The collectives wait for the slowest rank; the others' wait for it is not communication.
    one.seconds.append([max(rank.time for rank in each) * 1e-6 for each in iterations])
    one.exposed.append(statistics.median(min(rank.exposed for rank in each) for each in iterations) * 1e-6)
    one.segments = len(traces[0].segments)


def winner(tried: dict[Split, Tried]) -> Tried:
    """Return the fastest of those that were faster than the present split in every round, else the present one."""
    present = tried[None]
    faster = [one for one in tried.values() if one.faster_than(present)]
    return min(faster, key=lambda one: one.step, default=present)


def variable(split: Sequence[float]) -> str:
    """Return the value of ``NPU_DEVICE_SPLIT`` for a split.

    >>> variable((12.5, 87.5))
    '12.5%,87.5%'
    """
    return ",".join(f"{part:g}%" for part in split)


def outcome(tried: dict[Split, Tried]) -> str:
    """Return the measured times, and what to do."""
    best = winner(tried)
    lines = [f"{'split, % of the bytes':36}{'segments':>9}{'exposed, ms':>13}{'ms per step':>13}"]
    for one in tried.values():
        what = "as it is now" if one.split is None else ", ".join(f"{part:g}" for part in one.split)
        figures = f"{one.segments:>9}{statistics.median(one.exposed) * 1e3:>13.1f}{one.step * 1e3:>13.1f}"
        lines.append(f"{what:36}{figures}{'  <- chosen' if one is best else ''}")
    if best.split is None:
        return "\n".join([*lines, "", "No split was faster in every round than the present one: keep it."])
    gain = tried[None].step / best.step - 1
    return "\n".join(
        [
            *lines,
            "",
            f"Steps are {gain:.1%} faster than now. To keep it, paste before the first step",
            f"  set_split_strategy_by_size({list(best.split)})",
            f"or start the script with NPU_DEVICE_SPLIT={variable(best.split)}",
        ]
    )


def _require_split(run: Run, trace: RankTrace) -> None:
    """Compare the segments with those that the percentages give; sparse gradients and unknown sizes travel alone."""
    sizes = [one.bytes for one in trace.gradients if one.bytes]
    if run.split is None or len({one.dtype for one in trace.gradients}) > 1 or len(sizes) < len(trace.gradients):
        return
    wanted = cut_by_size(sizes, run.split)
    found = [last for _, last in trace.segments]
    if found != wanted:
        raise ValueError(
            f"{run.name} should have cut the gradients at {wanted}, but cut them at {found}.\nLikely cause: a split "
            "strategy set in the script (hccl.split.api) takes precedence over that of the tuner.\nWhat to do: remove "
            "the call of set_split_strategy_by_idx or set_split_strategy_by_size while tuning."
        )
