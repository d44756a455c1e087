"""Splits that were found earlier, one file for each model and cluster.

A file records what the split was found for, so that it isn't taken for another model, world size or machine. Looking
splits up is left to ``split_choice``. Imports no TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npu_device._src import environment

_VERSION = 1
_log = logging.getLogger("npu_device")


@dataclass(frozen=True)
class JobPlace:
    """The parts of a job's environment that the best split depends on.

    Attributes:
        world_size: number of ranks.
        ranks_per_host: number of ranks on each host, ascending.
        processor: the processor of rank 0's host, and its number of cores.
        backend: the one that reduces the gradients: ``"shared_memory"``, ``"mpi"`` or ``"tensorflow"``.
    """

    world_size: int
    ranks_per_host: tuple[int, ...]
    processor: str
    backend: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> JobPlace:
        """Return the place from the dict that ``asdict`` gave and JSON carried."""
        return cls(**{**values, "ranks_per_host": tuple(values["ranks_per_host"])})

    def differences(self, other: JobPlace) -> list[str]:
        """Return each difference of ``other`` as a text: ``"world_size 2 (was 4)"``."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]} (was {mine[name]})" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True)
class SavedSplit:
    """A split that was found earlier.

    Attributes:
        model: ``fingerprint`` of the gradients.
        group: name of the group.
        place: where it was found.
        ends: the last gradient of each segment.
        checked: True when runs have shown it to be faster; False when it is a prediction only.
        found: the figures behind it, for readers.
    """

    model: str
    group: str
    place: JobPlace
    ends: tuple[int, ...]
    checked: bool
    found: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the file's name, the same for the same model, group and place."""
        key = repr((self.group, asdict(self.place)))
        return f"{self.model}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SavedSplit:
        """Return the split from the dict that ``asdict`` gave and JSON carried."""
        return cls(
            model=str(values["model"]),
            group=str(values["group"]),
            place=JobPlace.from_dict(values["place"]),
            ends=tuple(int(end) for end in values["ends"]),
            checked=bool(values["checked"]),
            found=dict(values["found"]),
        )


def fingerprint(dtype: str, sizes: Iterable[int]) -> str:
    """Return a fingerprint of a model's gradients: of their dtype and their bytes in the order of production.

    >>> fingerprint("float32", [4, 8]) == fingerprint("float32", [8, 4])
    False
    """
    return hashlib.sha256(repr((dtype, [int(size) for size in sizes])).encode()).hexdigest()[:16]


def place_of(hosts: Sequence[str], backend: str, processor: str | None = None) -> JobPlace:
    """Return the place of a job.

    Args:
        hosts: name of each rank's host, by rank.
        backend: as in ``JobPlace``.
        processor: ``processor_of_this_host()`` of rank 0's host; None if that is this host.
    """
    counts = tuple(sorted(hosts.count(host) for host in set(hosts)))
    return JobPlace(len(hosts), counts, processor_of_this_host() if processor is None else processor, backend)


def directory() -> Path:
    """Return the directory of the files: ``NPU_DEVICE_SPLIT_DIR``, else ``~/.cache/npu_device/splits``."""
    given = environment.NPU_DEVICE_SPLIT_DIR.get()
    return Path(given) if given else Path.home() / ".cache" / "npu_device" / "splits"


def save(split: SavedSplit) -> Path:
    """Write a split, in place of the one for the same model, group and place. Returns the file.

    Raises:
        OSError: the file can't be written.
    """
    target = directory() / split.name
    target.parent.mkdir(parents=True, exist_ok=True)
    # Concurrent readers see either the old file or the new one.
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
        json.dump({"version": _VERSION, **asdict(split)}, file, indent=1)
    os.replace(file.name, target)
    return target


def load_all() -> list[SavedSplit]:
    """Return every saved split; a file that can't be read is logged and left out."""
    found = []
    for path in sorted(directory().glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']!r}; expected {_VERSION}")
            found.append(SavedSplit.from_dict(values))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the split in %s is ignored: %s: %s", path, type(error).__name__, error)
    return found


def processor_of_this_host() -> str:
    """Return the processor's name and the number of cores."""
    return f"{_processor_name()}, {os.cpu_count()} cores"


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine
