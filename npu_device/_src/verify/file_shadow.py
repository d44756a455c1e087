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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

COVERED = "files written by Python, Keras, numpy and HDF5, and TensorFlow's summaries, checkpoints and SavedModels"

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_READERS = ("stat", "lstat", "listdir", "scandir", "access", "readlink")
_WRITERS = ("mkdir", "remove", "unlink", "rmdir", "truncate", "chmod", "utime")
_MOVERS = ("rename", "replace", "link", "symlink")
_OF_TENSORFLOW = (
    ("train.Checkpoint", ("save", "write")),
    ("summary", ("create_file_writer",)),
    ("saved_model", ("save",)),
    ("io", ("write_file",)),
    ("io.gfile", ("makedirs", "mkdir", "remove", "rmtree", "rename", "copy")),
)


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

    def to_write(self, path: Any) -> Any:
        """Return the path to write to instead; the path itself where nothing is redirected."""
        inside = self._inside(path)
        if inside is None:
            return path
        self._makedirs(os.path.dirname(inside), exist_ok=True)
        return inside

    def to_read(self, path: Any) -> Any:
        """Return the path of what was written before; else the path itself."""
        inside = self._inside(path)
        return inside if inside is not None and self._exists(inside) else path

    def _inside(self, path: Any) -> str | None:
        if isinstance(path, int):
            return None
        given = os.fsdecode(os.fspath(path))
        text = os.path.abspath(given)
        if "://" in given or text.startswith(self._kept[0]):
            return None
        if text.startswith(self._kept) and not text.startswith(self._users):
            return None
        return self._folder + text

    def install(self) -> None:
        """Redirect Python's own calls."""
        self._makedirs: Callable[..., None] = functools.partial(_makedirs, os.mkdir, os.path.exists)
        self._exists: Callable[[str], bool] = functools.partial(_exists, os.stat)
        opened = io.open

        def redirected_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = any(letter in mode for letter in "wax+")
            if writes and "w" not in mode and "x" not in mode:
                self._copy(file)
            return opened(self.to_write(file) if writes else self.to_read(file), mode, *args, **kwargs)

        for owner in (builtins, io):
            self._replace(owner, "open", redirected_open)
        open_descriptor = os.open

        def redirected_os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            return open_descriptor(self.to_write(path) if writes else self.to_read(path), flags, *args, **kwargs)

        self._replace(os, "open", redirected_os_open)
        for name in _READERS:
            self._wrap(os, name, self.to_read)
        for name in _WRITERS:
            self._wrap(os, name, self.to_write)
        for name in _MOVERS:
            own = getattr(os, name)
            self._replace(os, name, _moving(own, self.to_read, self.to_write))

    def install_tensorflow(self, tf: Any) -> None:
        """Redirect what TensorFlow writes by itself, and HDF5."""
        for path, names in _OF_TENSORFLOW:
            owner = functools.reduce(getattr, path.split("."), tf)
            for name in names:
                self._wrap(owner, name, self.to_write, method=path == "train.Checkpoint")
        if "h5py" in sys.modules:
            h5py: Any = sys.modules["h5py"]
            own = h5py.File.__init__

            def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                if isinstance(name, (str, bytes, os.PathLike)):
                    name = self.to_read(name) if mode == "r" else self.to_write(name)
                own(file, name, mode, *args, **kwargs)

            self._replace(h5py.File, "__init__", init)

    def restore(self) -> None:
        """Give Python its own calls back."""
        while self._restored:
            owner, name, own = self._restored.pop()
            setattr(owner, name, own)

    def _copy(self, path: Any) -> None:
        """Copy a file that is about to be changed in place."""
        inside = self._inside(path)
        if inside is None or self._exists(inside) or not self._exists(os.fspath(path)):
            return
        data = Path(path).read_bytes()
        Path(self.to_write(path)).write_bytes(data)

    def _wrap(self, owner: Any, name: str, change: Callable[[Any], Any], method: bool = False) -> None:
        own = getattr(owner, name)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            place = 1 if method else 0
            if len(args) > place and isinstance(args[place], (str, bytes, os.PathLike)):
                args = (*args[:place], change(args[place]), *args[place + 1 :])
            return own(*args, **kwargs)

        self._replace(owner, name, wrapped)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._restored.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)


def redirect(folder: Path, own: str, script: str) -> Redirection:
    """Redirect what this process writes from now on; see ``Redirection``."""
    redirection = Redirection(folder, own, script)
    redirection.install()
    return redirection


def state_of(folders: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Return time and size of each file below some folders, to find out afterwards what has changed."""
    found = {}
    for folder in folders:
        for root, directories, names in os.walk(folder):
            directories[:] = [name for name in directories if not name.startswith((".", "__pycache__"))]
            for name in names:
                path = os.path.join(root, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                found[path] = (status.st_mtime_ns, status.st_size)
    return found


def _moving(own: Any, to_read: Callable[[Any], Any], to_write: Callable[[Any], Any]) -> Any:
    @functools.wraps(own)
    def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        return own(to_read(source), to_write(target), *args, **kwargs)

    return move


def _makedirs(mkdir: Any, exists: Any, path: str, exist_ok: bool = True) -> None:
    if path and not exists(path):
        _makedirs(mkdir, exists, os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            mkdir(path)


def _exists(stat: Any, path: str) -> bool:
    try:
        stat(path)
    except (OSError, ValueError):
        return False
    return True
