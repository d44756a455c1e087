"""The trace settings from the options of the script and the environment. Imports no TensorFlow."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from npu_device._src import environment

# A name and its value, whatever the quotes around them.
_PAIR = re.compile(r"""["']?(\w+)["']?\s*:\s*["']?([^"',}]*)["']?""")

_DENSE = 100

_log = logging.getLogger("npu_device")


@dataclass(frozen=True)
class Schedule:
    """The iterations to record: those in the windows, or without windows the first 100 and then fewer and fewer (every
    2nd up to 200, every 4th up to 400, …), so that a run of a million steps leaves some 800 lines.
    """

    windows: tuple[tuple[int, int], ...] = ()

    def wants(self, iteration: int) -> bool:
        """Return True for an iteration to record, from 1.

        >>> [number for number in range(95, 112) if Schedule().wants(number)]
        [95, 96, 97, 98, 99, 100, 102, 104, 106, 108, 110]
        """
        if self.windows:
            return any(first <= iteration <= last for first, last in self.windows)
        doublings = ((iteration - 1) // _DENSE).bit_length()
        return iteration % (1 << doublings) == 0


@dataclass(frozen=True)
class Settings:
    output: Path  # directory, made when it is missing
    schedule: Schedule = field(default_factory=Schedule)  # which iterations are recorded


def settings(enabled: bool, options: str | None) -> Settings | None:
    """Return the settings of the trace, None without one: those of the script if it turns the trace on, else those of
    ``PROFILING_MODE`` and ``PROFILING_OPTIONS``; ValueError if these are malformed."""
    if not enabled:
        if environment.PROFILING_MODE.get() != "true":
            return None
        options = environment.PROFILING_OPTIONS.get()
    found = read_options(options or "")
    if found.get("training_trace", "on").lower() == "off":
        return None
    ignored = [name for name in ("fp_point", "bp_point", "storage_limit") if found.get(name)]
    if ignored:  # until 0.3.0; they have an effect in 0.1.0
        _log.warning(
            "profiling options without effect: %s. The points of a step are found, and a trace stays small",
            ", ".join(ignored),
        )
    schedule = Schedule(environment.NPU_DEVICE_TRACE_ITERATIONS.get())
    return Settings(Path(found.get("output") or "./").resolve(), schedule)


def read_options(text: str) -> dict[str, str]:
    """Read Ascend's JSON; where a quote or comma is missing, as in many scripts, read what is readable and warn.

    >>> read_options('{"output":"/tmp/x","training_trace":"on}')
    {'output': '/tmp/x', 'training_trace': 'on'}
    """
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
        if isinstance(values, dict):
            return {str(name): str(value) for name, value in values.items()}
    except ValueError:
        pass
    found = {name: value.strip() for name, value in _PAIR.findall(text)}
    _log.warning("profiling options %r are not a JSON object; read as %s", text, found)
    return found
