"""Keeps the user's files as they are while ``npurun verify`` runs a script: what is written goes to a folder of its
own, which reads consult first.

Covered are Python's own files and directories (``open``, ``os``, ``pathlib``, ``shutil``) and what Keras and numpy
write through them, HDF5 files, TensorFlow's summaries, checkpoints, SavedModels and ``tf.io``. Not covered are other
programs, and libraries that write by themselves.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

COVERED = "files written by Python, Keras, numpy and HDF5, and TensorFlow's summaries, checkpoints and SavedModels"

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_REMOVERS = ("remove", "unlink", "rmdir")
_WRITTEN = (  # by TensorFlow: owner, names, place of the path among the arguments
    ("train.Checkpoint", ("save", "write"), 1),
    ("compat.v1.train.Saver", ("save",), 2),
    ("summary", ("create_file_writer",), 0),
    ("compat.v1.summary", ("FileWriter",), 0),
    ("saved_model", ("save",), 1),
    ("io", ("write_file",), 0),
    ("io.gfile", ("makedirs", "mkdir", "remove", "rmtree", "rename", "copy"), 0),
)
_READ = (
    ("train.Checkpoint", ("restore", "read"), 1),
    ("train", ("latest_checkpoint", "load_checkpoint", "list_variables"), 0),
    ("compat.v1.train.Saver", ("restore",), 2),
    ("saved_model", ("load",), 0),
    ("io", ("read_file",), 0),
    ("io.gfile", ("exists", "isdir", "glob", "listdir", "stat"), 0),
    ("data.experimental", ("make_csv_dataset",), 0),
    ("data.TextLineDataset", ("__init__",), 1),
    ("data.TFRecordDataset", ("__init__",), 1),
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
        if not isinstance(path, (str, bytes, os.PathLike)):
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
        """Return the path to write to instead, where a copy of the user's file is."""
        target = self._to_write(path)
        if target is not path and os.path.isfile(path) and not os.path.lexists(target):
            shutil.copyfile(path, target)
        return target

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
        read, write, change = self._to_read, self._to_write, self._to_change
        for names, paths in (
            (("stat", "lstat", "listdir", "scandir", "access", "readlink"), [read]),
            (("truncate", "chmod", "utime"), [change]),
            (("mkdir", *_REMOVERS), [write]),
            (("rename", "replace"), [change, write]),
            (("link", "symlink"), [read, write]),
        ):
            for name in names:
                _wrap(os, name, paths)

    def install_tensorflow(self, tf: Any) -> None:
        """Redirect what TensorFlow writes and reads by itself, and HDF5."""
        as_it_is: Callable[[Any], Any] = lambda value: value  # noqa: E731
        for change, table in ((self._to_write, _WRITTEN), (self._to_read, _READ)):
            for path, names, place in table:
                owner = functools.reduce(getattr, path.split("."), tf)
                for name in names:
                    _wrap(owner, name, [*[as_it_is] * place, change])
        if "h5py" in sys.modules:
            h5py: Any = sys.modules["h5py"]
            own = h5py.File.__init__

            def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                own(file, (self._to_read if mode == "r" else self._to_change)(name), mode, *args, **kwargs)

            h5py.File.__init__ = init


def _wrap(owner: Any, name: str, changes: Sequence[Callable[[Any], Any]]) -> None:
    """Change the paths among the first arguments of a function."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = [_whole(args[0], kwargs), *args[1:]] if args else []
        changed = [change(value) for change, value in zip(changes, first)]
        if name in _REMOVERS and changed and not os.path.lexists(changed[0]) and os.path.lexists(first[0]):
            return None  # the user's own stays
        return own(*changed, *first[len(changed) :], **kwargs)

    setattr(owner, name, wrapped)


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
