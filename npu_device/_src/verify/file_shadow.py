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
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

COVERED = (
    "files written by Python, Keras, numpy and HDF5, and TensorFlow's summaries, checkpoints, SavedModels and tf.io"
)

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_REMOVERS = ("remove", "unlink", "rmdir", "DeleteFile", "DeleteRecursively")
_CALLS = (  # owner, functions, place and keyword of a path, what happens to it
    ("os", "stat lstat access readlink", 0, "path", "read"),
    ("os", "truncate chmod utime", 0, "path", "change"),
    ("os", "mkdir remove unlink rmdir", 0, "path", "write"),
    ("os", "rename replace", 0, "src", "change"),
    ("os", "link symlink", 0, "src", "read"),
    ("os", "rename replace link symlink", 1, "dst", "write"),
    ("gfile", "BufferedInputStream FileExists IsDirectory Stat CopyFile", 0, "", "read"),
    ("gfile", "WritableFile RenameFile", 0, "", "change"),
    ("gfile", "CreateDir RecursivelyCreateDir DeleteFile DeleteRecursively", 0, "", "write"),
    ("gfile", "RenameFile CopyFile", 1, "", "write"),
    ("tf.train.Checkpoint", "save write", 1, "file_prefix", "write"),
    ("tf.train.CheckpointManager", "__init__", 2, "directory", "change"),
    ("tf.train.Checkpoint", "restore read", 1, "save_path", "read"),
    ("tf.train", "latest_checkpoint", 0, "checkpoint_dir", "read"),
    ("tf.train", "load_checkpoint list_variables", 0, "ckpt_dir_or_file", "read"),
    ("tf.compat.v1.train.Saver", "save", 2, "save_path", "write"),
    ("tf.compat.v1.train.Saver", "restore", 2, "save_path", "read"),
    ("tf.summary", "create_file_writer", 0, "logdir", "write"),
    ("summary", "create_file_writer_v2", 0, "logdir", "write"),
    ("tf.compat.v2.summary", "create_file_writer", 0, "logdir", "write"),
    ("events", "EventsWriter", 0, "", "write"),
    ("tf.saved_model", "save", 1, "export_dir", "write"),
    ("tf.saved_model", "load", 0, "export_dir", "read"),
    ("tf.io", "write_file", 0, "filename", "write"),
    ("tf.io", "read_file", 0, "filename", "read"),
    ("tf.io.TFRecordWriter", "__init__", 1, "path", "write"),
    ("tf.data.Dataset", "save", 1, "path", "write"),
    ("tf.data.Dataset", "cache", 1, "filename", "write"),
    ("tf.data.Dataset", "load", 0, "path", "read"),
    ("tf.data.experimental", "make_csv_dataset", 0, "file_pattern", "read"),
    ("tf.data.TextLineDataset", "__init__", 1, "filenames", "read"),
    ("tf.data.TFRecordDataset", "__init__", 1, "filenames", "read"),
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
        self._kept = (os.path.realpath(own) + os.sep, *_SYSTEM, os.path.realpath(tempfile.gettempdir()) + os.sep)
        self._users = tuple(path + os.sep for path in {os.getcwd(), os.path.dirname(os.path.realpath(script))})

    def move(self, folder: Path) -> None:
        """Write to another folder from now on, which begins with what has been written."""
        if os.path.exists(self._folder):
            shutil.copytree(self._folder, folder)
        self._folder = str(folder)

    def _inside(self, path: Any) -> str | None:
        if not isinstance(path, (str, bytes, os.PathLike)) or not path:
            return None
        given = os.fsdecode(os.fspath(path))
        text = os.path.abspath(given)
        place = text + os.sep
        is_kept = place.startswith(self._kept) and not place.startswith(self._users)
        return None if "://" in given or place.startswith(self._kept[0]) or is_kept else self._folder + text

    def _to_read(self, path: Any) -> Any:
        """Return the path of what was written before; else the path itself."""
        if isinstance(path, (list, tuple)):
            return [self._to_read(each) for each in path]
        inside = self._inside(path)
        is_there = inside is not None and any(map(os.path.lexists, (inside, f"{inside}.index")))  # of a checkpoint
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

    def _listed(self, own: Callable[[Any], Any], path: Any = ".") -> list[Any]:
        """Return what a directory holds and what was written there."""
        inside = None if isinstance(path, bytes) else self._inside(path)
        if inside is None or not os.path.lexists(inside):
            return list(own(path))
        found: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # the user has none; TensorFlow raises an error of its own
            found.update((getattr(each, "name", each), each) for each in own(path))
        return list({**found, **{getattr(each, "name", each): each for each in own(inside)}}.values())

    def _matching(self, own: Callable[[Any], Any], pattern: Any) -> list[str]:
        """Return the files that match a pattern of TensorFlow, and those that were written."""
        found = [self._as_given(path) for path in own(self._inside(pattern) or "")]
        start = os.path.dirname(os.fsdecode(pattern))
        dot = "./" if start.split(os.sep)[0] in ("", ".") else ""  # as TensorFlow gives them
        relative = [dot + os.path.relpath(path) for path in found]
        return sorted({*own(pattern), *(found if os.path.isabs(start) else relative)})

    def _as_given(self, result: Any) -> Any:
        """Return a result, which is a path of the user again if it is one to which something was written."""
        is_inside = isinstance(result, str) and result.startswith(self._folder + os.sep)
        return result[len(self._folder) :] if is_inside else result

    def install(self) -> None:
        """Redirect Python's own calls."""
        opened, open_descriptor = io.open, os.open

        def redirected_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = any(letter in mode for letter in "wax+")
            return opened((self._to_change if writes else self._to_read)(file), mode, *args, **kwargs)

        def redirected_os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = (self._to_change if writes else self._to_read)(_whole(path, kwargs))
            return open_descriptor(path, flags, *args, **kwargs)

        builtins.open = io.open = redirected_open
        os.open = redirected_os_open
        os.listdir, scandir = functools.partial(self._listed, os.listdir), os.scandir
        os.scandir = lambda path=".": _Entries(self._listed(scandir, path))  # type: ignore[assignment]
        self._wrap_calls(os=os)

    def _wrap_calls(self, **owners: Any) -> None:
        for path, names, place, keyword, kind in _CALLS:
            first, *rest = path.split(".")
            for name in names.split() if first in owners else ():
                owner = functools.reduce(getattr, rest, owners[first])
                self._wrap(owner, name, place, keyword, getattr(self, f"_to_{kind}"))

    def _wrap(self, owner: Any, name: str, place: int, keyword: str, change: Callable[[Any], Any]) -> None:
        """Change a path among the arguments of a function."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given: Any = {**dict(enumerate(args)), **kwargs}
            key = place if place < len(args) else keyword
            if key in given:
                before = _whole(given[key], given)
                given[key] = change(before)
                if name in _REMOVERS and not os.path.lexists(given[key]) and os.path.lexists(before):
                    return None  # the user's own stays
            return self._as_given(own(*[given.pop(number) for number in range(len(args))], **given))

        setattr(owner, name, wrapped)

    def install_tensorflow(self, tf: Any) -> None:
        """Redirect what TensorFlow writes and reads by itself, and HDF5."""
        from npu_device._src import compat

        functions = compat.file_functions()
        self._wrap_calls(tf=tf, **functions)
        gfile = functions["gfile"]
        children, gfile.GetMatchingFiles = gfile.GetChildren, functools.partial(self._matching, gfile.GetMatchingFiles)
        gfile.GetChildren = lambda path: self._listed(children, os.fsdecode(path))
        if "h5py" in sys.modules:
            h5py: Any = sys.modules["h5py"]
            own = h5py.File.__init__

            def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                own(file, (self._to_read if mode == "r" else self._to_change)(name), mode, *args, **kwargs)

            h5py.File.__init__ = init


class _Entries(contextlib.ExitStack):
    """Entries of a directory as ``os.scandir`` gives them."""

    def __init__(self, entries: list[Any]) -> None:
        super().__init__()
        self._left = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._left

    def __next__(self) -> Any:
        return next(self._left)


def _whole(path: Any, keywords: dict[str, Any]) -> Any:
    """Return a path that doesn't depend on an open directory."""
    descriptor = keywords.pop("dir_fd", None)
    if descriptor is None:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))


def state_of(folders: Sequence[Path], own: Path) -> dict[str, tuple[int, int]]:
    """Return time and size of files below some folders, to find out afterwards what has changed; not of all of many,
    and none of the directory of all runs.
    """
    found: dict[str, tuple[int, int]] = {}
    for root, directories, names in (each for folder in folders for each in os.walk(folder)):
        directories[:] = sorted(
            name for name in directories if not name.startswith((".", "__pycache__")) and Path(root, name) != own
        )
        for path in (os.path.join(root, name) for name in names if len(found) < _MOST_FILES):
            if os.path.exists(path):
                status = os.stat(path)
                found[path] = (status.st_mtime_ns, status.st_size)
    return found
