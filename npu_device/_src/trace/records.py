"""The parts of a trace, how the points of an iteration become a record, and how to read it. Imports no TensorFlow.

``DIR/rank<rank>/iterations.jsonl``: the first line describes the rank and its model, each further line an iteration.
When the split changes, a new first line follows; the part with the most iterations counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from npu_device._src import environment

_log = logging.getLogger("npu_device")

VERSION = 1
FILE = "iterations.jsonl"
UNKNOWN = math.nan
"""The time of a point of an iteration that isn't marked."""


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
    allreduce: Sequence[list[float]]  # start and end of the reduction of each segment
    # When each gradient was there, in the order of ``RankTrace.gradients``.
    ready: Sequence[float]
    # ``iteration_end`` of the iteration before, recorded or not; None for the first.
    previous_end: float | None = None
    # With divided updates, this rank has made its own, and all ranks begin to exchange new values.
    update_end: float | None = None

    @property
    def gather(self) -> float:
        """Return the microseconds in which the ranks exchange new values."""
        if self.update_end is None:
            return 0.0
        return self.iteration_end - self.update_end

    @property
    def input_wait(self) -> float:
        """Return the microseconds between the previous iteration and this one; 0 for the first."""
        return self.fp_start - self.iteration_start

    @property
    def iteration_start(self) -> float:
        if self.previous_end is None:
            return self.fp_start
        return self.previous_end

    @property
    def step(self) -> float:
        """Return the microseconds from the end of the previous iteration."""
        return self.iteration_end - self.iteration_start

    @property
    def reduced(self) -> float:
        """Return when backward and all reductions are over."""
        return max([self.bp_end, *(end for _, end in self.allreduce)])

    @property
    def exposed(self) -> float:
        """Return the microseconds of communication after backward."""
        return self.reduced - self.bp_end

    @property
    def update(self) -> float:
        """Return the microseconds of the optimizer, up to the exchange of new values."""
        return self.iteration_end - self.gather - self.reduced

    @property
    def hidden(self) -> float:
        """Return the microseconds of communication while backward ran; overlapping segments count once."""
        covered = 0.0
        covered_until = self.fp_start
        for start, end in sorted(self.allreduce):
            until = min(end, self.bp_end)
            covered += max(0.0, until - max(start, covered_until))
            covered_until = max(covered_until, until)
        return covered

    @property
    def alone(self) -> float:
        """Return the microseconds of forward and backward without communication."""
        return self.bp_end - self.fp_start - self.hidden


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank. ``model`` leaves out names: TensorFlow numbers them by what else a process has built."""

    rank: int
    world_size: int
    host: str
    pid: int
    clock_offset_us: float  # the correction added to its own clock, in microseconds
    # The uncertainty of that; 0 on the host of rank 0, None when it could not be measured.
    clock_error_us: float | None
    model: str = ""
    engine: str = ""
    group: str = ""
    # In the order of production; gradients of one segment stand together.
    gradients: tuple[GradientRecord, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()  # first and last gradient of each segment
    iterations: tuple[Iteration, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    def bytes_of(self, segment: int) -> int:
        low, high = self.segments[segment]
        return sum(gradient.bytes for gradient in self.gradients[low : high + 1])

    def header(self) -> dict[str, Any]:
        """Return the first line of the file; the iterations follow one by one."""
        header = asdict(self)
        del header["iterations"]
        # Its name in the files, which other versions read.
        header["backend"] = header.pop("engine")
        return {"version": VERSION, **header}


def read(directory: str | Path) -> list[RankTrace]:
    """Return the traces in a directory, by rank, without a line that a process was writing when it died.

    Raises:
        ValueError: no such directory; a file isn't a trace, or of a version that this package can't read.
    """
    if not Path(directory).is_dir():
        raise ValueError("there is no trace: no such directory")
    traces = []
    for path in Path(directory).glob(f"rank*/{FILE}"):
        sections = _sections(path)
        if sections:
            # The first steps may have reduced something else, such as the gradients of a part of the model.
            traces.append(max(sections, key=lambda section: len(section.iterations)))
    return sorted(traces, key=lambda trace: trace.rank)


def _sections(path: Path) -> list[RankTrace]:
    """Return the trace of a file for each split of the gradients, which begins with a header."""
    sections = []
    iterations: list[Iteration] = []
    # Another rank may be writing at this moment: a last line without a newline isn't complete yet.
    for line_number, line in enumerate(
        path.read_text(encoding="utf-8").splitlines(keepends=True), start=1
    ):
        if not line.endswith("\n"):
            break
        try:
            fields = json.loads(line)
            if "version" in fields:
                iterations = []
                sections.append((fields, iterations))
            else:
                iterations.append(Iteration(**fields))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {line_number}, is not a line of a trace: {error!r}"
            ) from error
    return list(itertools.starmap(_trace, sections))


def _trace(fields: dict[str, Any], iterations: list[Iteration]) -> RankTrace:
    version = fields.pop("version")
    if version != VERSION:
        raise ValueError(f"a trace of version {version}; this package reads version {VERSION}")
    fields["engine"] = fields.pop("backend", "")
    fields["gradients"] = tuple(GradientRecord(**gradient) for gradient in fields["gradients"])
    fields["segments"] = tuple((low, high) for low, high in fields["segments"])
    in_order = sorted(iterations, key=lambda iteration: iteration.iteration)
    return RankTrace(**fields, iterations=tuple(in_order))


@dataclass(frozen=True)
class PointSchema:
    """The points of an iteration: fp_start, bp_end, when each gradient was there, the ends of segments, update_end, and
    iteration_end. All but those of gradients and segments may be ``UNKNOWN``.
    """

    trace: RankTrace  # the gradients and their segments, without iterations
    waits_for_all: bool = False  # no segment starts before all gradients are there

    def iteration(
        self, index: int, points: Sequence[float], previous_end: float | None
    ) -> Iteration:
        """Return the record of an iteration, from the times of its points in seconds, in the order of the class."""
        # Rounded to a tenth of a microsecond, which is finer than the clock.
        times = [round(point * 1e6 + self.trace.clock_offset_us, 1) for point in points]
        fp_start, bp_end, *middle, update_end, end = times
        count = len(self.trace.gradients)
        ready = middle[:count]
        allreduce = self._intervals(ready, middle[count:])
        # Without a point of its own, the last gradient marks the end of the backward pass, and the last reduction that
        # of the iteration.
        if math.isnan(fp_start):
            fp_start = previous_end or ready[0]
        if math.isnan(bp_end):
            bp_end = max(ready)
        ends = [over for _, over in allreduce]
        if not math.isnan(end):
            ends.append(end)
        own_end = None
        if not math.isnan(update_end):
            own_end = update_end
        return Iteration(
            iteration=index,
            # The least and the greatest time are taken: threads note the points, so that an end may seem to come before
            # what it ends.
            fp_start=min([fp_start, *ready]),
            bp_end=bp_end,
            iteration_end=max(ends),
            allreduce=allreduce,
            ready=ready,
            previous_end=previous_end,
            update_end=own_end,
        )

    def _intervals(self, ready: Sequence[float], ends: Sequence[float]) -> list[list[float]]:
        """Return start and end of the reduction of each segment; it starts when its last gradient is there."""
        intervals = []
        for (low, high), end in zip(self.trace.segments, ends):
            awaited = ready
            if not self.waits_for_all:
                awaited = ready[low : high + 1]
            start = max(awaited)
            intervals.append([start, max(start, end)])
        return intervals


def model_of(gradients: Sequence[GradientRecord], shapes: Sequence) -> str:
    """Return what tells models apart: a digest of the dtypes and shapes of their gradients."""
    described = [[gradient.dtype, str(shape)] for gradient, shape in zip(gradients, shapes)]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=8).hexdigest()


class TraceFile:
    """The file of one rank. If it would exceed the limit (bytes), the older half of its iterations goes."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self._rank = rank
        self._path = settings.output / f"rank{rank}" / FILE
        self._settings = settings
        self._lock = threading.Lock()
        self._trace: RankTrace | None = None
        self._iteration = 0
        self._previous_end: float | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = self._path.open("w", encoding="utf-8")

    def add(self, schema: PointSchema, points: Sequence[float]) -> None:
        with self._lock:
            if self._file is None or not self._accepts(schema.trace):
                return
            self._iteration += 1
            iteration = schema.iteration(self._iteration, points, self._previous_end)
            self._previous_end = iteration.iteration_end
            if is_recorded(self._iteration, self._settings.windows):
                self._write(iteration.__dict__)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _accepts(self, trace: RankTrace) -> bool:
        """Accept a trace if it is the first, another cut of the same model, or has more bytes."""
        old = self._trace
        if old is not None and old.model != trace.model:
            # The reductions of a smaller model, such as a part of this model, are no iterations of it.
            if trace.bytes <= old.bytes:
                return False
            assert self._file is not None
            self._file.seek(0)
            self._file.truncate()
            # The count begins anew, since what was recorded isn't of this model.
            self._iteration = 0
            self._previous_end = None
        self._trace = trace
        # Only another cut or model is written: a function that was traced again has the same.
        if old is None or (old.model, old.segments) != (trace.model, trace.segments):
            self._write(trace.header())
        return True

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            text = json.dumps(line, separators=(",", ":")) + "\n"
            limit = self._settings.storage_limit
            if limit is not None and self._file.tell() + len(text) > limit:
                self._drop_older_half(self._file)
            self._file.write(text)
            # A trace may be read while the job runs.
            self._file.flush()
        except OSError as error:
            _log.warning(
                "rank %d: tracing ends here, %s can't be written: %s",
                self._rank,
                self._path,
                error,
            )
            # It writes what is left once more.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _drop_older_half(self, file: TextIO) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # Iterations of an earlier cut have other segments.
        last = max(number for number, line in enumerate(lines) if '"version"' in line)
        header, *iterations = lines[last:]
        newer = iterations[len(iterations) // 2 + 1 :]
        file.seek(0)
        file.truncate()
        file.writelines(f"{line}\n" for line in (header, *newer))


# A name and its value, whatever the quotes around them.
_PAIR = re.compile(r"""["']?(\w+)["']?\s*:\s*["']?([^"',}]*)["']?""")

_STORAGE = re.compile(r"([1-9]\d*)\s*MB", re.IGNORECASE)

_DENSE = 100


def is_recorded(iteration: int, windows: Sequence[tuple[int, int]]) -> bool:
    """Return True for an iteration, from 1, in one of the windows; without windows, for the first 100, and then fewer
    and fewer (every 2nd up to 200, every 4th up to 400, …), so that a run of a million steps leaves some 800 lines.

    >>> [number for number in range(95, 112) if is_recorded(number, ())]
    [95, 96, 97, 98, 99, 100, 102, 104, 106, 108, 110]
    """
    if windows:
        return any(start <= iteration <= end for start, end in windows)
    doublings = ((iteration - 1) // _DENSE).bit_length()
    return iteration % (1 << doublings) == 0


@dataclass(frozen=True)
class Settings:
    output: Path  # directory, made when it is missing
    windows: tuple[tuple[int, int], ...] = ()  # iterations that are recorded; see ``is_recorded``
    fp_point: str = ""  # name of the operation with which forward starts; "" finds it
    bp_point: str = ""  # name of the operation with which backward ends; "" finds it
    storage_limit: int | None = None  # bytes that a rank may write


def settings(enabled: bool, options: str | None) -> Settings | None:
    """Return the settings of the trace, None without one: those of the script if it turns the trace on, else those of
    ``PROFILING_MODE`` and ``PROFILING_OPTIONS``; ValueError if these or ``storage_limit`` are malformed."""
    if not enabled:
        if environment.PROFILING_MODE.get() != "true":
            return None
        options = environment.PROFILING_OPTIONS.get()
    by_name = read_options(options or "")
    if by_name.get("training_trace", "on").lower() == "off":
        return None
    return Settings(
        output=Path(by_name.get("output") or "./").resolve(),
        windows=environment.NPU_DEVICE_TRACE_ITERATIONS.get(),
        fp_point=by_name.get("fp_point", ""),
        bp_point=by_name.get("bp_point", ""),
        storage_limit=_bytes(by_name.get("storage_limit", "")),
    )


def _bytes(text: str) -> int | None:
    if not text:
        return None
    match = _STORAGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"storage_limit in the profiling options is {text!r}; expected megabytes, such as '200MB'"
        )
    return int(match.group(1)) * 1_000_000


def read_options(text: str) -> dict[str, str]:
    """Read Ascend's JSON; where a quote or comma is missing, as in many scripts, read what is readable and warn.

    >>> read_options('{"output":"/tmp/x","training_trace":"on}')
    {'output': '/tmp/x', 'training_trace': 'on'}
    """
    if not text.strip():
        return {}
    try:
        options = json.loads(text)
        if isinstance(options, dict):
            return {str(name): str(option) for name, option in options.items()}
    except ValueError:
        pass
    options = {name: option.strip() for name, option in _PAIR.findall(text)}
    _log.warning("profiling options %r are not a JSON object; read as %s", text, options)
    return options
