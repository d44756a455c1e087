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
from itertools import islice
from pathlib import Path
from typing import Any, Callable

COVERED = "files written by Python, Keras, numpy and HDF5, and TensorFlow's summaries, checkpoints and SavedModels"

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_READERS = ("stat", "lstat", "listdir", "scandir", "access", "readlink")
_CHANGERS = ("truncate", "chmod", "utime")
_REMOVERS = ("remove", "unlink", "rmdir")
_OF_TENSORFLOW = (
    ("train.Checkpoint", ("save", "write")),
    ("compat.v1.train.Saver", ("save",)),
    ("summary", ("create_file_writer",)),
    ("compat.v1.summary", ("FileWriter",)),
    ("saved_model", ("save",)),
    ("io", ("write_file",)),
    ("io.gfile", ("makedirs", "mkdir", "remove", "rmtree", "rename", "copy")),
)
_MOST_FILES = 20_000  # whose changes are looked for


class Redirection:
    """The redirection of this process.

    Args:
        folder: where everything is written.
        own: the directory of all runs, where nothing is redirected.
        script: the script's path.

    Temporary files are not redirected, unless the script or the working directory is among them.
    """

    def __init__(self, folder: Path, own: str, script: str) -> None:
        self._folder = str(folder)
        self._kept = (os.path.realpath(own) + os.sep, *_SYSTEM, os.path.realpath(tempfile.gettempdir()) + os.sep)
        self._users = tuple(path + os.sep for path in {os.getcwd(), os.path.dirname(os.path.realpath(script))})
        self._restored: list[tuple[Any, str, Any]] = []

    def move(self, folder: Path) -> None:
        """Write to another folder from now on, which begins with what has been written."""
        if os.path.exists(self._folder):
            shutil.copytree(self._folder, folder)
        self._folder = str(folder)

    def to_write(self, path: Any) -> Any:
        """Return the path to write to instead; the path itself where nothing is redirected."""
        inside = self._inside(path)
        if inside is None:
            return path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        return inside

    def to_read(self, path: Any) -> Any:
        """Return the path of what was written before; else the path itself."""
        inside = self._inside(path)
        return inside if inside is not None and os.path.lexists(inside) else path

    def _inside(self, path: Any) -> str | None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        given = os.fsdecode(os.fspath(path))
        text = os.path.abspath(given)
        place = text + os.sep
        if "://" in given or place.startswith(self._kept[0]):
            return None
        if place.startswith(self._kept) and not place.startswith(self._users):
            return None
        return self._folder + text

    def install(self) -> None:
        """Redirect Python's own calls."""
        opened, open_descriptor = io.open, os.open

        def redirected_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return opened(self._to_open(file, any(letter in mode for letter in "wax+")), mode, *args, **kwargs)

        def redirected_os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            path = self._to_open(_whole(path, kwargs), bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
            return open_descriptor(path, flags, *args, **kwargs)

        for owner in (builtins, io):
            self._replace(owner, "open", redirected_open)
        self._replace(os, "open", redirected_os_open)
        read, write = self.to_read, self.to_write
        change = functools.partial(self._to_open, writes=True)
        wrapped: tuple[tuple[Sequence[str], Sequence[Callable[[Any], Any]]], ...] = (
            (_READERS, [read]),
            (_CHANGERS, [change]),
            (_REMOVERS, [write]),
            (("mkdir",), [write]),
            (("rename", "replace"), [change, write]),
            (("link", "symlink"), [read, write]),
        )
        for names, changes in wrapped:
            for name in names:
                self._wrap(os, name, changes)

    def install_tensorflow(self, tf: Any) -> None:
        """Redirect what TensorFlow writes by itself, and HDF5."""
        for path, names in _OF_TENSORFLOW:
            owner = functools.reduce(getattr, path.split("."), tf)
            for name in names:
                place = {"train.Checkpoint": 1, "compat.v1.train.Saver": 2}.get(path, int(path == "saved_model"))
                self._wrap(owner, name, [lambda value: value] * place + [self.to_write])
        if "h5py" in sys.modules:
            h5py: Any = sys.modules["h5py"]
            own = h5py.File.__init__

            def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                own(file, self._to_open(name, mode != "r"), mode, *args, **kwargs)

            self._replace(h5py.File, "__init__", init)

    def restore(self) -> None:
        """Give Python its own calls back."""
        while self._restored:
            owner, name, own = self._restored.pop()
            setattr(owner, name, own)

    def _to_open(self, path: Any, writes: bool) -> Any:
        """Return the path to open; a file that is about to be changed in place is copied first."""
        if not writes:
            return self.to_read(path)
        target = self.to_write(path)
        if target is not path and os.path.isfile(path) and not os.path.lexists(target):
            shutil.copyfile(path, target)
        return target

    def _wrap(self, owner: Any, name: str, changes: Sequence[Callable[[Any], Any]]) -> None:
        """Change the paths among a function's first arguments."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            first = [_whole(args[0], kwargs), *args[1:]] if args else []
            changed = [change(value) for change, value in zip(changes, first)]
            if name in _REMOVERS and changed and not os.path.lexists(changed[0]) and os.path.lexists(first[0]):
                return None  # the user's own stays
            return own(*changed, *first[len(changed) :], **kwargs)

        self._replace(owner, name, wrapped)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._restored.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)


def state_of(folders: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Return time and size of files below some folders, to find out afterwards what has changed; not of all of many."""
    paths = (os.path.join(root, name) for folder in folders for root, _, names in _walk(folder) for name in names)
    found = {}
    for path in islice(paths, _MOST_FILES):
        if os.path.exists(path):
            status = os.stat(path)
            found[path] = (status.st_mtime_ns, status.st_size)
    return found


def _walk(folder: Path) -> Any:
    for root, directories, names in os.walk(folder):
        directories[:] = sorted(name for name in directories if not name.startswith((".", "__pycache__")))
        yield root, directories, names


def _whole(path: Any, keywords: dict[str, Any]) -> Any:
    """Return a path that doesn't depend on an open directory."""
    descriptor = keywords.pop("dir_fd", None)
    if descriptor is None:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))
