"""The trace settings from the options of the script and the environment. Imports no TensorFlow."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from npu_device._src import environment

_STORAGE = re.compile(r"(\d+)\s*MB", re.IGNORECASE)
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
        """Return True for an iteration to record; they count from 1.

        >>> [number for number in range(95, 112) if Schedule().wants(number)]
        [95, 96, 97, 98, 99, 100, 102, 104, 106, 108, 110]
        >>> Schedule(((3, 4), (10, 10))).wants(4)
        True
        """
        if self.windows:
            return any(first <= iteration <= last for first, last in self.windows)
        doublings = ((iteration - 1) // _DENSE).bit_length()
        return iteration % (1 << doublings) == 0


@dataclass(frozen=True)
class Settings:
    """The settings of a trace."""

    output: Path  # directory, made when it is missing
    fp_point: str = ""  # name of the operation with which forward starts; "" finds it
    bp_point: str = ""  # name of the operation with which backward ends; "" finds it
    storage_limit: int | None = None  # maximum bytes per rank; None for no limit
    schedule: Schedule = field(default_factory=Schedule)  # which iterations are recorded


def settings(enabled: bool, options: str | None) -> Settings | None:
    """Return the settings of the trace; None without one.

    Args:
        enabled: ``profiling_config.enable_profiling`` of the script.
        options: its ``profiling_config.profiling_options``, JSON. They apply when the script itself has turned the
            trace on, otherwise those of ``PROFILING_OPTIONS`` do.

    Raises:
        ValueError: a malformed environment variable or ``storage_limit``.
    """
    if not enabled:
        if environment.PROFILING_MODE.get() != "true":
            return None
        options = environment.PROFILING_OPTIONS.get()
    found = read_options(options or "")
    if found.get("training_trace", "on").lower() == "off":
        return None
    return Settings(
        output=Path(found.get("output") or "./").resolve(),
        fp_point=found.get("fp_point", ""),
        bp_point=found.get("bp_point", ""),
        storage_limit=_bytes(found.get("storage_limit", "")),
        schedule=Schedule(environment.NPU_DEVICE_TRACE_ITERATIONS.get()),
    )


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


def _bytes(text: str) -> int | None:
    if not text:
        return None
    match = _STORAGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"storage_limit in the profiling options is {text!r}; expected megabytes, such as '200MB'")
    return int(match.group(1)) * 1_000_000
