"""The parts of a trace, and how to read it from disk. Imports no TensorFlow.

``DIR/rank<rank>/iterations.jsonl``: the first line describes the rank and its model, each further line an iteration.
When the split changes, a new first line follows; the part with the most iterations counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = 1
FILE = "iterations.jsonl"


@dataclass(frozen=True)
class GradientRecord:
    """One gradient: name of the tensor, dtype ("sparse float32" for rows) and bytes (0 when not known beforehand)."""

    name: str
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Iteration:
    """One iteration; all times in microseconds since the epoch, on the clock of rank 0."""

    iteration: int  # number of the iteration, from 1
    fp_start: float  # the first operation of the step begins
    bp_end: float  # backward has produced its last gradient
    iteration_end: float
    allreduce: tuple[tuple[float, float], ...]
    ready: tuple[float, ...]  # when each gradient was there, in the order of ``RankTrace.gradients``
    previous_end: float | None = None  # ``iteration_end`` of the iteration before, recorded or not; None for the first

    @property
    def input_wait(self) -> float | None:
        """Return the microseconds between the previous iteration and this one; None for the first."""
        return None if self.previous_end is None else self.fp_start - self.previous_end

    @property
    def begin(self) -> float:
        return self.fp_start if self.previous_end is None else self.previous_end

    @property
    def time(self) -> float:
        return self.iteration_end - self.begin

    @property
    def last_reduced(self) -> float:
        return max((end for _, end in self.allreduce), default=self.bp_end)

    @property
    def exposed(self) -> float:
        """Return the microseconds of communication after backward."""
        return max(0.0, self.last_reduced - self.bp_end)

    @property
    def hidden(self) -> float:
        """Return the microseconds of communication while backward ran; overlapping segments count once."""
        covered, reached = 0.0, self.fp_start
        for start, end in sorted(self.allreduce):
            until = min(end, self.bp_end)
            covered += max(0.0, until - max(start, reached))
            reached = max(reached, until)
        return covered


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank. ``model`` leaves out names: TensorFlow numbers them by what else a process has built."""

    rank: int
    world_size: int
    host: str
    pid: int
    clock_offset_us: float  # the correction added to its own clock, in microseconds
    clock_error_us: float | None  # the uncertainty of that; 0 on the host of rank 0, None when it could not be measured
    model: str = ""
    backend: str = ""
    group: str = ""
    gradients: tuple[GradientRecord, ...] = ()  # in the order of production; those of one segment stand together
    segments: tuple[tuple[int, int], ...] = ()  # first and last gradient of each segment
    iterations: tuple[Iteration, ...] = ()

    def bytes_of(self, segment: int) -> int:
        first, last = self.segments[segment]
        return sum(gradient.bytes for gradient in self.gradients[first : last + 1])

    def header(self) -> dict[str, Any]:
        values = asdict(self)
        del values["iterations"]
        return {"version": VERSION, **values}


def on_all_ranks(traces: Sequence[RankTrace]) -> list[tuple[Iteration, ...]]:
    """Return the iterations that every rank has, in order, as one record per rank. Needs at least one trace."""
    by_number = [{one.iteration: one for one in trace.iterations} for trace in traces]
    common = sorted(set.intersection(*map(set, by_number)))
    return [tuple(iterations[number] for iterations in by_number) for number in common]


def read(directory: str | Path) -> list[RankTrace]:
    """Return the traces in a directory, by rank, without a line that a process was writing when it died.

    Raises:
        ValueError: no such directory; a file isn't a trace, or of a version that this package can't read.
    """
    if not Path(directory).is_dir():
        raise ValueError("there is no trace: no such directory")
    found = []
    for path in Path(directory).glob(f"rank*/{FILE}"):
        parts = list(_parts(path))
        if parts:
            found.append(max(parts, key=lambda part: len(part.iterations)))
    return sorted(found, key=lambda trace: trace.rank)


def _parts(path: Path) -> Iterator[RankTrace]:
    header: dict[str, Any] | None = None
    iterations: list[Iteration] = []
    # Another rank may be writing at this moment: a last line without a newline isn't complete yet.
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            values = json.loads(line)
            if "version" in values:
                if header is not None:
                    yield _trace(header, iterations)
                header, iterations = values, []
            else:
                iterations.append(_iteration(values))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a line of a trace: {error!r}") from error
    if header is not None:
        yield _trace(header, iterations)


def _trace(header: dict[str, Any], iterations: list[Iteration]) -> RankTrace:
    values = dict(header)
    version = values.pop("version")
    if version != VERSION:
        raise ValueError(f"a trace of version {version}; this package reads version {VERSION}")
    values["gradients"] = tuple(GradientRecord(**gradient) for gradient in values["gradients"])
    values["segments"] = tuple((first, last) for first, last in values["segments"])
    return RankTrace(**values, iterations=tuple(sorted(iterations, key=lambda one: one.iteration)))


def _iteration(values: dict[str, Any]) -> Iteration:
    allreduce = tuple((start, end) for start, end in values["allreduce"])
    return Iteration(**{**values, "allreduce": allreduce, "ready": tuple(values["ready"])})
