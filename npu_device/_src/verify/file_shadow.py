"""Keeps the user's files as they are while ``npurun verify`` runs a script: what is written goes to a folder of its
own, which reads consult first.

Covered are Python's own files and directories (``open``, ``os``, ``pathlib``, ``shutil``) and what Keras and numpy
write through them, HDF5 files, TensorFlow's summaries, checkpoints, SavedModels and ``tf.io``. Not covered are other
programs, and libraries that write by themselves.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import inspect
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

COVERED = (
    "files written by Python, Keras, numpy and HDF5, "
    "and TensorFlow's summaries, checkpoints, SavedModels and tf.io"
)

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_REMOVERS = ("remove", "unlink", "rmdir", "DeleteFile", "DeleteRecursively")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CALLS = {  # what happens to the path that they are given: functions and methods
    "open": "builtins.open io.open os.open h5py.File.__init__",
    "read": "os.stat os.lstat os.access os.readlink os.link os.symlink gfile.BufferedInputStream gfile.FileExists "
    "gfile.IsDirectory gfile.Stat gfile.CopyFile tf.io.read_file tf.train.Checkpoint.restore tf.train.Checkpoint.read "
    "tf.train.latest_checkpoint tf.train.load_checkpoint tf.train.list_variables tf.compat.v1.train.Saver.restore "
    "tf.saved_model.load tf.data.Dataset.load tf.data.experimental.make_csv_dataset tf.data.TextLineDataset.__init__ "
    "tf.data.TFRecordDataset.__init__",
    "change": "os.truncate os.chmod os.utime os.rename os.replace gfile.WritableFile gfile.RenameFile "
    "tf.train.CheckpointManager.__init__",
    "write": "os.mkdir os.remove os.unlink os.rmdir gfile.CreateDir gfile.RecursivelyCreateDir gfile.DeleteFile "
    "gfile.DeleteRecursively tf.train.Checkpoint.save tf.train.Checkpoint.write tf.compat.v1.train.Saver.save "
    "tf.summary.create_file_writer summary.create_file_writer_v2 tf.compat.v2.summary.create_file_writer "
    "events.EventsWriter tf.saved_model.save tf.io.write_file tf.io.TFRecordWriter.__init__ tf.data.Dataset.save "
    "tf.data.Dataset.cache",
    "write second": "os.rename os.replace os.link os.symlink gfile.RenameFile gfile.CopyFile",
}
_PATHS = re.compile(
    "path|file|filenames?|file_prefix|save_path|logdir|export_dir|directory|src|name|checkpoint_dir|file_pattern|ckpt_dir_or_file"
)
_MOST_FILES = 20_000  # whose changes are looked for


class Redirection:
    """The redirection of this process.

    Args:
        own: the directory of all runs, where nothing is redirected.
        script: the path of the script.

    Temporary files are not redirected, unless the script or the working directory is among them.
    """

    def __init__(self, own: str, script: str) -> None:
        self._folder = ""
        self._kept = (
            os.path.realpath(own) + os.sep,
            *_SYSTEM,
            os.path.realpath(tempfile.gettempdir()) + os.sep,
        )
        self._users = tuple(
            path + os.sep for path in {os.getcwd(), os.path.dirname(os.path.realpath(script))}
        )

    def copy(self, folder: Path) -> None:
        """Let another folder begin with what has been written."""
        if os.path.exists(self._folder):
            shutil.copytree(self._folder, folder)

    def move(self, folder: Path) -> None:
        """Write to another folder from now on; all ranks of a run write to the same."""
        self._folder = str(folder)

    def _inside(self, path: Any) -> str | None:
        if not isinstance(path, (str, bytes, os.PathLike)) or not path:
            return None
        given = os.fsdecode(os.fspath(path))
        text = os.path.abspath(given)
        place = text + os.sep
        is_kept = place.startswith(self._kept) and not place.startswith(self._users)
        return (
            None
            if "://" in given or place.startswith(self._kept[0]) or is_kept
            else self._folder + text
        )

    def _to_read(self, path: Any) -> Any:
        """Return the path of what was written before; else the path itself."""
        if isinstance(path, (list, tuple)):
            return [self._to_read(each) for each in path]
        inside = self._inside(path)
        is_there = inside is not None and any(
            map(os.path.lexists, (inside, f"{inside}.index"))
        )  # of a checkpoint
        return inside if is_there else path

    def _to_write(self, path: Any) -> Any:
        """Return the path to write to instead; the path itself where nothing is redirected."""
        inside = self._inside(path)
        if inside is None:
            return path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        return inside

    def _to_change(self, path: Any) -> Any:
        """Return the path to write to instead, where a copy of the user's file or directory is."""
        target = self._to_write(path)
        if target is not path and not os.path.lexists(target) and os.path.exists(path):
            (shutil.copytree if os.path.isdir(path) else shutil.copyfile)(path, target)
        return target

    def install(self) -> None:
        """Redirect Python's own calls."""
        self._wrap_calls(builtins=builtins, io=io, os=os)
        scandir = os.scandir

        def merged(path: Any = ".") -> Any:
            inside = None if isinstance(path, bytes) else self._inside(path)
            if inside is None or not os.path.lexists(inside):
                return scandir(path)
            found: dict[str, Any] = {}
            with contextlib.suppress(OSError):  # the user has none
                found.update((each.name, each) for each in scandir(path))
            return _Entries(
                iter({**found, **{each.name: each for each in scandir(inside)}}.values())
            )

        os.scandir = merged
        os.listdir = lambda path=".": [each.name for each in merged(path)]

    def install_tensorflow(self, tf: Any) -> None:
        """Redirect what TensorFlow writes and reads by itself, and HDF5."""
        from npu_device._src import compat

        functions = compat.file_functions()
        self._wrap_calls(tf=tf, h5py=sys.modules.get("h5py"), **functions)
        gfile = functions["gfile"]
        children, matching = gfile.GetChildren, gfile.GetMatchingFiles

        def listed(path: Any) -> Any:
            return children(path) if self._inside(path) is None else os.listdir(os.fsdecode(path))

        def matched(pattern: Any) -> Any:
            if self._inside(pattern) is None:
                return matching(pattern)
            text = os.fsdecode(pattern)
            start = "" if os.path.dirname(text) else "./"  # as TensorFlow gives them
            return sorted(start + path for path in glob.glob(text))

        gfile.GetChildren, gfile.GetMatchingFiles = listed, matched

    def _wrap_calls(self, **owners: Any) -> None:
        for kind, names in _CALLS.items():
            for path in names.split():
                first, *rest, name = path.split(".")
                if owners.get(first):
                    self._wrap(functools.reduce(getattr, rest, owners[first]), name, kind)

    def _wrap(self, owner: Any, name: str, kind: str) -> None:
        """Change a path among the arguments of a function, and in its result."""
        own = getattr(owner, name)
        place, keyword = _path_of(own)
        kinds = {"open": self._to_read, "read": self._to_read, "change": self._to_change}
        change = kinds.get(kind, self._to_write)
        if kind == "write second":
            place, keyword = place + 1, "dst"

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            key = place if place < len(args) else keyword
            if key in given:
                path, directory = given[key], given.pop("dir_fd", None)
                if directory is not None:
                    path = os.path.join(
                        os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(path)
                    )
                writes = kind == "open" and _writes(
                    given.get(place + 1, given.get("mode", given.get("flags")))
                )
                given[key] = (self._to_change if writes else change)(path)
                if name in _REMOVERS and not os.path.lexists(given[key]) and os.path.lexists(path):
                    return None  # the user's own stays
            result = own(*[given.pop(number) for number in range(len(args))], **given)
            written = isinstance(result, str) and result.startswith(self._folder + os.sep)
            return result[len(self._folder) :] if written else result  # one of the user's again

        setattr(owner, name, wrapped)


def _path_of(function: Any) -> tuple[int, str]:
    """Return place and name of the path among the parameters of a function; the first if it doesn't tell them."""
    parameters: Collection[str] = ()
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters
    return next((each for each in enumerate(parameters) if _PATHS.fullmatch(each[1])), (0, ""))


def _writes(mode: str | int | None) -> bool:
    return bool(mode & _WRITES if isinstance(mode, int) else set(mode or "r").intersection("wax+"))


class _Entries(contextlib.ExitStack):
    """Entries of a directory as ``os.scandir`` gives them."""

    def __init__(self, entries: Iterator[Any]) -> None:
        super().__init__()
        self._left = entries

    def __iter__(self) -> Iterator[Any]:
        return self._left

    def __next__(self) -> Any:
        return next(self._left)


def changed_since(begin: float, folders: Collection[Path], own: Path) -> list[str]:
    """Return which of the first files below some folders have changed; none of the directory of all runs."""
    found: set[str] = set()
    seen = 0
    for root, directories, names in (each for folder in folders for each in os.walk(folder)):
        directories[:] = sorted(
            name
            for name in directories
            if not name.startswith((".", "__pycache__")) and Path(root, name) != own
        )
        seen += len(names)
        if seen < _MOST_FILES:
            paths = (os.path.join(root, name) for name in names)
            found.update(
                path for path in paths if os.path.exists(path) and os.stat(path).st_ctime > begin
            )
    return sorted(found)
