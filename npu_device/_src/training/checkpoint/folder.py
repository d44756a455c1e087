"""The files of the checkpoints of a job in one directory: written beside, synced, renamed, then named as the latest.

Knows files only, neither TensorFlow nor ranks.

::

    directory/
      latest.json                the step of the newest checkpoint; written last
      step-00000200/
        manifest.json            step, world size, versions, and size and checksum of each file
        shared.index, shared.data-00000-of-00001
        rank-00000.json, rank-00000.index, …
      .step-00000300-1f2e3d4c/   being written, or left by a job that was killed
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from npu_device._src.cluster.rank_errors import NpuDeviceError

FORMAT = 1
SHARED = "shared"
_LATEST = "latest.json"
_MANIFEST = "manifest.json"
_FINISHED = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-(?P<step>\d{8,})-(?P<token>[0-9a-f]+)")
_CHUNK = 1 << 22


class CheckpointError(NpuDeviceError, OSError):
    """A checkpoint can't be written or read."""


def require_local(directory: str | os.PathLike[str]) -> None:
    # ``Path`` has made one slash of two.
    if re.match(r"\w{2,}:/", os.fspath(directory)):
        raise ValueError(
            f"the directory of checkpoints must be on a file system; found the URL {str(directory)!r}.\n"
            "What to do: mount it on the hosts (gcsfuse, NFS, a persistent volume), or use a disk of each host that "
            "outlives the job."
        )


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def partial_name(step: int, token: str) -> str:
    """Return the name of the folder in which a job writes the files of a step before they are complete."""
    return f".{name_of(step)}-{token}"


def own_prefix(rank: int) -> str:
    return f"rank-{rank:05d}"


def sync_files(folder: Path, prefix: str) -> dict[str, list[int]]:
    """Write files ``{prefix}.*`` through to the disk; return their size in bytes and checksum by name."""
    files = {}
    for path in sorted(folder.glob(f"{prefix}.*")):
        _sync(path)
        files[path.name] = _size_and_checksum(path)
    return files


def finish(directory: Path, partial: str, step: int, manifest: dict[str, Any]) -> None:
    """Complete the folder of a step and give it its name; one that has it already is replaced."""
    folder = directory / partial
    _write_json(folder / _MANIFEST, {"format": FORMAT, "step": step, **manifest})
    # The names of the files are part of the folder, and have to be on the disk before it is renamed.
    _sync(folder)
    target = directory / name_of(step)
    # The old folder's name fits ``_PARTIAL``, so that ``tidy`` finds it after a kill.
    old = directory / f"{partial}0"
    # A folder can't replace one that has files, so the old one is moved aside first.
    if target.exists():
        os.replace(target, old)
    os.replace(folder, target)
    # A rename is on the disk only when the folder around it is.
    _sync(directory)
    shutil.rmtree(old, ignore_errors=True)


def latest(directory: Path) -> int | None:
    """Return the step of the newest checkpoint; None if none is named. Raise CheckpointError if it can't be read."""
    try:
        text = (directory / _LATEST).read_text(encoding="utf-8")
        return int(json.loads(text)["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / _LATEST} can't be read ({error})") from error


def readable_latest(directory: Path) -> int | None:
    """Return the step of the newest checkpoint; None if none is named, or it can't be read."""
    with contextlib.suppress(CheckpointError):
        return latest(directory)
    return None


def name_latest(directory: Path, step: int) -> None:
    # The file gets its name when it is complete: a reader never sees half of it.
    beside = directory / f".{_LATEST}.part"
    _write_json(beside, {"step": step})
    os.replace(beside, directory / _LATEST)
    _sync(directory)


def steps(directory: Path) -> tuple[list[int], str | None]:
    """Return the finished steps up to the latest, newest first, and what is wrong with the name of the latest."""
    # A checkpoint that is newer than the latest was never named, or a user has named an older one to go back to it.
    finished = _finished(directory)
    try:
        named = latest(directory)
    except CheckpointError as error:
        return finished, str(error)
    if named is None:
        if not finished:
            return [], None
        return finished, f"{directory / _LATEST} is missing"
    up_to_named = [step for step in finished if step <= named]
    if named in finished:
        return up_to_named, None
    existing = ", ".join(map(str, finished)) or "no step"
    return up_to_named, f"{directory / _LATEST} names step {named}; the directory has {existing}"


def manifest_of(directory: Path, step: int, name: str = "") -> dict[str, Any]:
    """Return the manifest of a checkpoint, perhaps under another name; raise CheckpointError if it can't be read."""
    path = directory / (name or name_of(step)) / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        is_known = manifest["format"] == FORMAT
        complete = isinstance(manifest["files"], dict) and manifest["step"] == step
        world_size = int(manifest["world_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not is_known or not complete or world_size < 1:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT} for step {step}")
    return dict(manifest)


def damage(directory: Path, step: int, files: dict[str, Sequence[int]], prefix: str) -> str | None:
    """Return what is wrong with the files ``{prefix}.*``, given size and checksum of all by name; None if nothing."""
    expected = {name: sums for name, sums in files.items() if name.startswith(f"{prefix}.")}
    if not expected:
        return f"{directory / name_of(step)} has no files {prefix}.*"
    for name, (size, checksum) in expected.items():
        path = directory / name_of(step) / name
        try:
            actual_size, actual_checksum = _size_and_checksum(path)
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        if actual_size != size:
            return f"{path} is torn: {actual_size} bytes; expected {size}"
        if actual_checksum != checksum:
            return f"{path} is corrupted: its checksum differs"
    return None


def keep_only(directory: Path, latest: int, keep: int) -> list[str]:
    """Remove checkpoints beyond the newest ``keep``, and those newer than the latest; return what remains in spite."""
    finished = _finished(directory)
    newest = [step for step in finished if step <= latest][:keep]
    # Checkpoints above the latest go, too: they belong to a training that went back to an older one.
    return _remove(directory / name_of(step) for step in finished if step not in newest)


def tidy(directory: Path, but: str = "") -> list[str]:
    """Remove what killed jobs have left half-written, but not a given job's; return what could not be removed."""
    leftovers = []
    # In sorted order, the new folder of a step comes before the old one: the new one gets the name
    # of the step, and the old one is removed.
    for match in sorted(_matches(directory, _PARTIAL), key=lambda match: match[0]):
        step = int(match["step"])
        target = directory / name_of(step)
        folder = directory / match[0]
        if match["token"] == but:
            continue
        if not target.exists():
            # A complete folder gets its name: the job was killed while it replaced a checkpoint of the same step.
            with contextlib.suppress(CheckpointError):
                # The manifest is written after all other files.
                manifest_of(directory, step, match[0])
                os.replace(folder, target)
                continue
        leftovers.append(folder)
    return _remove(leftovers)


def _finished(directory: Path) -> list[int]:
    finished = [int(match[1]) for match in _matches(directory, _FINISHED)]
    return sorted(finished, reverse=True)


def _matches(directory: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    matches = []
    for path in directory.iterdir():
        match = pattern.fullmatch(path.name)
        if match is not None and path.is_dir():
            matches.append(match)
    return matches


def _remove(folders: Iterable[Path]) -> list[str]:
    problems = []
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            problems.append(f"{folder}: {error}")
    return problems


def _size_and_checksum(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    # The content has to be on the disk first, which a rename could otherwise reach before it.
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
